// The columns of the op table. A row is a group of equal ops (its number is its `what`) or one op.

// Figures of rows in one mode, read in the same way for groups and for single ops.
function figuresOf(model, mode, groups) {
  if (mode === "groups") {
    return {
      what: (row) => row,
      kind: (row) => groups.kind[row],
      ops: (row) => groups.ops[row],
      measured: (row) => groups.measured[row],
      bound: (row) => (groups.known[row] ? groups.bound[row] : NaN),
      fused: (row) => (groups.known[row] ? groups.fused[row] : NaN),
      expected: (row) => groups.expected[row] || NaN,
      flops: (row) => groups.flops[row],
      bytes: (row) => groups.bytes[row],
      lost: (row) => (groups.known[row] ? groups.measured[row] - groups.bound[row] : NaN),
      module: (row) => model.module[groups.first[row]],
    };
  }
  const kind = (row) => model.kind[row];
  const known = (row) => model.modeled[model.kind[row]];
  return {
    what: (row) => model.whatOf[row],
    kind,
    ops: () => 1,
    measured: (row) => model.measured[row],
    bound: (row) => (known(row) ? model.bound[kind(row)] : NaN),
    fused: (row) => (known(row) ? model.fused[kind(row)] : NaN),
    expected: (row) => model.expected[kind(row)],
    flops: (row) => model.flops[kind(row)],
    bytes: (row) => model.bytes[kind(row)],
    lost: (row) => (known(row) ? model.measured[row] - model.bound[kind(row)] : NaN),
    module: (row) => model.module[row],
  };
}

function rate(amount, time, unit) {
  return amount > 0 && time > 0 ? quantity(amount / time, unit) : "-";
}

// Each: id, label, width in pixels, key to sort by, text of a cell, and `full` where that is cut.
// Times are in one unit, so that they can be compared.
function columnsOf(model, view) {
  const ranks = {};
  const byText = (name) => {
    ranks[name] = ranks[name] || alphabetical(model[name].values);
    return (row) => ranks[name][model[name].index[view.figures.what(row)]];
  };
  const moduleRanks = () => (ranks.module = ranks.module || alphabetical(model.modules));
  const limiterRanks = () => (ranks.limiter = ranks.limiter || alphabetical(model.limiter.values));
  const figure = (name) => (row) => view.figures[name](row);
  const time = (name) => (row) => view.time(view.figures[name](row));
  const shown = (name) => (row) => whatText(model, name, view.figures.what(row)) || "-";
  const slower = (row) => (view.figures.bound(row) > 0 ? view.figures.measured(row) / view.figures.bound(row) : NaN);
  return [
    {
      id: "op",
      label: "op",
      width: widthOf(model.short.values, 110, 190),
      sortText: true,
      key: () => byText("short"),
      text: shown("short"),
      full: shown("name"),
    },
    {
      id: "lost",
      label: "lost",
      timed: true,
      width: 80,
      number: true,
      about: "measured less bound",
      key: () => (row) => {
        const lost = view.figures.lost(row);
        return lost === lost ? lost : view.figures.measured(row); // without a bound all of it may be lost
      },
      text: time("lost"),
    },
    {
      id: "measured",
      label: "measured",
      timed: true,
      width: 98,
      number: true,
      about: "how long its kernels ran",
      key: () => figure("measured"),
      text: time("measured"),
    },
    { id: "bar", label: "", width: 90, about: "measured, of which the bound is dark" },
    {
      id: "share",
      label: "share",
      width: 66,
      number: true,
      about: "of the wall time",
      key: () => figure("measured"),
      text: (row) => percent(view.figures.measured(row) / model.wall),
    },
    { id: "phase", label: "phase", width: 86, sortText: true, key: () => byText("phase"), text: shown("phase") },
    {
      id: "ops",
      label: "ops",
      width: 58,
      number: true,
      key: () => figure("ops"),
      text: (row) => count(view.figures.ops(row)),
    },
    {
      id: "bound",
      label: "bound",
      timed: true,
      width: 84,
      number: true,
      about: "as written: no run of it on this machine is faster",
      key: () => figure("bound"),
      text: time("bound"),
    },
    {
      id: "times",
      label: "x bound",
      width: 68,
      number: true,
      about: "measured over bound",
      key: () => slower,
      text: (row) => {
        const found = slower(row);
        return found === found ? significant(found, 2) : "-";
      },
    },
    {
      id: "line",
      label: "line",
      width: widthOf(model.source.values, 70, 180),
      sortText: true,
      key: () => byText("source"),
      text: (row) => ending(shown("source")(row), 26),
      full: shown("source"),
    },
    {
      id: "module",
      label: "module",
      width: widthOf(model.modules, 90, 380),
      sortText: true,
      key: () => {
        const order = moduleRanks();
        return (row) => order[view.figures.module(row)];
      },
      text: (row) => ending(view.moduleText(row) || "-", 58),
      full: (row) => view.moduleText(row) || "-",
    },
    {
      id: "limiter",
      label: "limit",
      width: 84,
      sortText: true,
      about: "what limits the bound",
      key: () => {
        const order = limiterRanks();
        return (row) => order[model.limiter.index[view.figures.kind(row)]];
      },
      text: (row) => limiterOf(model, view.figures.kind(row)),
    },
    {
      id: "expected",
      label: "expected",
      timed: true,
      width: 98,
      number: true,
      about: "what good kernels take",
      key: () => figure("expected"),
      text: time("expected"),
    },
    {
      id: "fused",
      label: "fused",
      timed: true,
      width: 84,
      number: true,
      about: "its share of the floor of the group that it can be fused into",
      key: () => figure("fused"),
      text: time("fused"),
    },
    { id: "shapes", label: "shapes", width: 220, sortText: true, key: () => byText("shapes"), text: shown("shapes") },
    {
      id: "flops",
      label: "FLOP/s",
      width: 96,
      number: true,
      key: () => (row) => view.figures.flops(row) / view.figures.measured(row),
      text: (row) => rate(view.figures.flops(row), view.figures.measured(row), "FLOP/s"),
    },
    {
      id: "bytes",
      label: "B/s",
      width: 84,
      number: true,
      about: "of what it must read and write at the least",
      key: () => (row) => view.figures.bytes(row) / view.figures.measured(row),
      text: (row) => rate(view.figures.bytes(row), view.figures.measured(row), "B/s"),
    },
    { id: "family", label: "family", width: 100, sortText: true, key: () => byText("family"), text: shown("family") },
  ];
}

// The width in pixels of a column of texts, the longest of which it shows whole where there is room.
function widthOf(texts, least, most) {
  const longest = texts.reduce((length, text) => Math.max(length, text.length), 0);
  return Math.min(most, Math.max(least, Math.ceil(18 + CHARACTER * longest)));
}

const CHARACTER = 7.3; // pixels at the size of these columns

// A path without its beginning where it is too long: what tells it from others is at its end.
function ending(text, most) {
  return text.length > most ? `…${text.slice(1 - most)}` : text;
}

function limiterOf(model, kind) {
  return model.modeled[kind] ? model.limiter.values[model.limiter.index[kind]] : "no bound";
}

const LIMITERS = ["memory", "cache", "compute", "launch", "none"];

// The class that colors it.
function limiterClass(limiter) {
  return `l-${LIMITERS.includes(limiter) ? limiter : "other"}`;
}

// One unit for all times of a table: its size in seconds, its name, and how many decimals.
function unitOf(longest) {
  const [scale, name] = [
    [1, "s"],
    [1e-3, "ms"],
    [1e-6, "us"],
  ].find(([size]) => longest >= size) || [1e-9, "ns"];
  return [scale, name, longest >= 100 * scale ? 2 : 3];
}
