// What the op table shows: search, phase, limiter, family, module, line, and the ops of a finding.

const MOST_CHOICES = 300;

// The ops that pass a filter (Uint32Array), or null where all do.
function matchingOps(model, filter) {
  const whats = new Uint8Array(model.whatCount).fill(1);
  const only = (name, value) => {
    if (!value) return;
    const wanted = model[name].values.indexOf(value);
    for (let what = 0; what < whats.length; what += 1) if (model[name].index[what] !== wanted) whats[what] = 0;
  };
  only("phase", filter.phase);
  only("family", filter.family);
  only("source", filter.line);
  if (filter.what !== null)
    for (let what = 0; what < whats.length; what += 1) if (what !== filter.what) whats[what] = 0;
  const kinds = new Uint8Array(model.what.length);
  for (let kind = 0; kind < kinds.length; kind += 1) {
    const costs = model.kernels[kind] > 0 || model.bound[kind] > 0;
    const limited = !filter.limiter || limiterOf(model, kind) === filter.limiter;
    kinds[kind] = whats[model.what[kind]] && limited && (costs || filter.free) ? 1 : 0;
  }
  const modules = modulesIn(model.modules, filter.module);
  const terms = filter.search
    .toLowerCase()
    .split(/\s+/)
    .filter(Boolean)
    .map((term) => termFlags(model, term));
  const source = filter.finding === null ? null : model.findings[filter.finding].ops;
  const size = source ? source.length : model.opCount;
  const found = new Uint32Array(size);
  let used = 0;
  for (let i = 0; i < size; i += 1) {
    const op = source ? source[i] : i;
    const kind = model.kind[op];
    const module = model.module[op];
    if (!kinds[kind] || !modules[module]) continue;
    const what = model.what[kind];
    if (terms.every((term) => term.whats[what] || term.modules[module])) {
      found[used] = op;
      used += 1;
    }
  }
  return found.subarray(0, used);
}

function termFlags(model, term) {
  const hits = (name) => model[name].values.map((text) => text.toLowerCase().includes(term));
  const columns = ["name", "source", "shapes", "family"].map((name) => [hits(name), model[name].index]);
  const whats = new Uint8Array(model.whatCount);
  for (let what = 0; what < whats.length; what += 1)
    whats[what] = columns.some(([hit, index]) => hit[index[what]]) ? 1 : 0;
  return { whats, modules: Uint8Array.from(model.modules, (path) => (path.toLowerCase().includes(term) ? 1 : 0)) };
}

// For each module whether it is inside of another one: "a.b.c" is in "a.b" and in "a.*.c". Where none is, the last part
// may be a beginning, as while somebody types it.
function modulesIn(paths, prefix) {
  if (!prefix) return new Uint8Array(paths.length).fill(1);
  const wanted = prefix.split(".");
  const last = wanted.length - 1;
  const flags = (same) =>
    Uint8Array.from(paths, (path) => {
      const parts = path.split(".");
      return wanted.every((part, at) => at < parts.length && (part === "*" || same(parts[at], part, at))) ? 1 : 0;
    });
  const exact = flags((found, part) => found === part);
  return exact.includes(1)
    ? exact
    : flags((found, part, at) => found === part || (at === last && found.startsWith(part)));
}

function filterBar(model, table, root) {
  const empty = () => ({
    search: "",
    phase: "",
    limiter: "",
    family: "",
    module: "",
    line: "",
    finding: null,
    what: null,
    free: false,
  });
  const state = { filter: empty(), mode: "groups" };
  const controls = {};

  function add(name, label, control) {
    controls[name] = control;
    labeled(name, label, control);
    control.addEventListener("input", () => {
      state.filter[name] = control.type === "checkbox" ? control.checked : control.value;
      apply();
    });
  }
  function labeled(name, label, control) {
    control.id = `filter-${name}`;
    root.append(make("span", { class: "filter" }, make("label", { for: control.id, text: label }), control));
  }
  function choices(values) {
    const control = make("select", {}, make("option", { value: "", text: "all" }));
    values.forEach((value) => control.append(make("option", { value, text: value })));
    return control;
  }

  add(
    "search",
    "Search",
    make("input", { type: "search", placeholder: "op, module, line, shape", autocomplete: "off", spellcheck: "false" }),
  );
  add("phase", "Phase", choices(model.phase.values.filter(Boolean)));
  add("limiter", "Limit", choices([...new Set(Array.from(model.what.keys(), (kind) => limiterOf(model, kind)))]));
  add("family", "Family", choices(model.family.values.filter(Boolean)));
  add("line", "Line", choices(linesByTime(model)));
  const list = make("datalist", { id: "module-list" });
  model.modules.slice(0, MOST_CHOICES).forEach((value) => list.append(make("option", { value })));
  add(
    "module",
    "Module",
    make("input", {
      type: "text",
      list: "module-list",
      placeholder: "model.layers.*",
      autocomplete: "off",
      spellcheck: "false",
    }),
  );
  root.append(list);
  add("free", "Also what costs nothing", make("input", { type: "checkbox" }));
  const single = make("input", { type: "checkbox" });
  single.addEventListener("input", () => {
    state.mode = single.checked ? "ops" : "groups";
    apply();
  });
  labeled("single", "One by one", single);
  const chip = button(
    "",
    () => {
      state.filter.finding = null;
      state.filter.what = null;
      apply();
    },
    { class: "chip", hidden: true },
  );
  const reset = button("Clear filters", clearFilters, { class: "reset" });
  const status = make("span", { class: "status", role: "status" });
  root.append(chip, reset, status);

  function clearFilters() {
    state.filter = empty();
    for (const [name, control] of Object.entries(controls)) {
      if (control.type === "checkbox") control.checked = state.filter[name];
      else control.value = state.filter[name];
    }
    apply();
  }

  function set(changes, mode = state.mode) {
    clearFilters();
    Object.assign(state.filter, changes);
    for (const [name, value] of Object.entries(changes)) if (controls[name]) controls[name].value = value;
    state.mode = mode;
    single.checked = mode === "ops";
    apply();
  }

  function apply() {
    const ops = matchingOps(model, state.filter);
    const rows = table.show(ops, state.mode);
    const { finding, what } = state.filter;
    const about =
      finding !== null
        ? `finding ${finding + 1}: ${model.findings[finding].rule}`
        : what !== null
          ? whatText(model, "short", what)
          : "";
    chip.hidden = !about;
    chip.textContent = `${about} ×`;
    chip.setAttribute("aria-label", `Only ${about}. Remove this filter.`);
    let time = 0;
    for (const op of ops) time += model.measured[op];
    const groups = state.mode === "groups" ? ` in ${counted(rows, "group")}` : "";
    status.textContent = `${counted(ops.length, "op")}${groups}, ${seconds(time)}`;
  }

  // Goes to a row, without filters where these hide it.
  function goTo(what, op) {
    if (table.goTo(what, op)) return;
    clearFilters();
    if (table.goTo(what, op)) return;
    set({ free: true });
    controls.free.checked = true;
    table.goTo(what, op);
  }

  table.onSingle = (what) => {
    set({ what }, "ops");
    table.grid.focus();
  };
  apply();
  return { set, goTo, state, clearFilters };
}

// The source lines, those with most of the time first.
function linesByTime(model) {
  const time = new Map();
  for (let op = 0; op < model.opCount; op += 1) {
    const line = model.source.index[model.whatOf[op]];
    time.set(line, (time.get(line) || 0) + model.measured[op]);
  }
  const lines = [...time.keys()].filter((line) => model.source.values[line]);
  return lines
    .sort((a, b) => time.get(b) - time.get(a))
    .slice(0, MOST_CHOICES)
    .map((line) => model.source.values[line]);
}
