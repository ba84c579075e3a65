// The data of the page: columns as arrays, ops by what they do, and the tree of modules.

// The values of a column, whichever way it is written.
function columnOf(data) {
  if (Array.isArray(data)) return data;
  if ("all" in data) return new Array(data.count).fill(data.all);
  return data.index.map((at) => data.values[at]);
}

// A column of texts as its different values and an index into them.
function textsOf(data) {
  const seen = new Map();
  const index = Uint32Array.from(columnOf(data), (text) => {
    if (!seen.has(text)) seen.set(text, seen.size);
    return seen.get(text);
  });
  return { values: [...seen.keys()], index };
}

function numbersOf(data, scale = 1) {
  return Float64Array.from(columnOf(data), (value) => (value === null ? NaN : value * scale));
}

function sumsOf(differences) {
  let reached = 0;
  return Float64Array.from(columnOf(differences), (value) => {
    reached += value;
    return reached;
  });
}

// The indices of pairs "left out, following".
function indicesOf(runs) {
  const found = [];
  let at = 0;
  for (let i = 0; i < runs.length; i += 2) {
    at += runs[i];
    for (let j = 0; j < runs[i + 1]; j += 1) found.push(at + j);
    at += runs[i + 1];
  }
  return found;
}

function readModel(data) {
  const ops = data.ops;
  const texts = ["name", "family", "phase", "source", "shapes", "limiter"];
  const shorts = new Map(Object.entries(ops.short));
  const model = { wall: data.wall * 1e-9, roofs: data.roofs, timeline: data.timeline };
  model.excerpts = new Map(Object.entries(data.excerpts)); // a line may be named as a method of objects is
  for (const name of texts) model[name] = textsOf(ops[name]);
  model.short = { values: model.name.values.map((name) => shorts.get(name)), index: model.name.index };
  model.what = Uint32Array.from(sumsOf(ops.what));
  model.kernels = numbersOf(ops.kernels);
  model.modeled = Uint8Array.from(columnOf(ops.modeled));
  for (const [name, amount] of Object.entries(ops.amounts)) model[name] = numbersOf(amount.column, amount.unit);
  for (const [name, times] of Object.entries(ops.times)) model[name] = numbersOf(times, 1e-9);
  model.kind = Uint32Array.from(sumsOf(ops.kind));
  model.modules = ops.modules;
  model.module = Uint32Array.from(sumsOf(ops.module));
  model.measured = numbersOf(ops.measured, 1e-9);
  model.findings = data.findings.map((found) => ({ rule: found.rule, ops: indicesOf(found.ops) }));
  model.opCount = model.kind.length;
  model.whatCount = model.name.index.length;
  model.whatOf = model.kind.map((kind) => model.what[kind]);
  return model;
}

function whatText(model, column, what) {
  return model[column].values[model[column].index[what]];
}

// Sums over ops for each `what`: those in `ops`, or all of them.
function groupsOf(model, ops) {
  const size = model.whatCount;
  const groups = {
    what: [],
    ops: new Uint32Array(size),
    first: new Int32Array(size).fill(-1),
    kind: new Int32Array(size),
  };
  for (const name of ["measured", "bound", "fused", "expected", "flops", "bytes", "kernels", "known", "unknown"]) {
    groups[name] = new Float64Array(size);
  }
  const total = ops ? ops.length : model.opCount;
  for (let i = 0; i < total; i += 1) {
    const op = ops ? ops[i] : i;
    const kind = model.kind[op];
    const what = model.what[kind];
    if (groups.first[what] < 0) {
      groups.first[what] = op;
      groups.kind[what] = kind;
      groups.what.push(what);
    }
    groups.ops[what] += 1;
    groups.measured[what] += model.measured[op];
    groups.bound[what] += model.bound[kind];
    groups.fused[what] += model.fused[kind]; // not a number where one of them is not known
    if (model.expected[kind] === model.expected[kind]) groups.expected[what] += model.expected[kind];
    groups.flops[what] += model.flops[kind];
    groups.bytes[what] += model.bytes[kind];
    groups.kernels[what] += model.kernels[kind];
    groups[model.modeled[kind] ? "known" : "unknown"][what] += 1;
    if (model.bound[kind] > model.bound[groups.kind[what]]) groups.kind[what] = kind;
  }
  return groups;
}

// The names of modules as one, with * for what differs: "model.layers.*.mlp".
function commonModule(names) {
  if (names.length < 2) return names[0] || "";
  const parts = names.map((name) => name.split("."));
  const shortest = parts.reduce((least, each) => Math.min(least, each.length), Infinity);
  const longest = parts.reduce((most, each) => Math.max(most, each.length), 0);
  const found = [];
  for (let i = 0; i < shortest; i += 1) {
    const same = parts.every((each) => each[i] === parts[0][i]);
    if (same) found.push(parts[0][i]);
    else if (found[found.length - 1] !== "*" || shortest === longest) found.push("*");
    if (!same && shortest !== longest) return found.join(".");
  }
  if (shortest !== longest) found.push("*");
  return found.join(".");
}

const OUTSIDE = "(outside of modules)";

// The tree of modules; `path` is null for what is none. Each has the time and the bound of all in it.
function modulesOf(model) {
  const module = (name, path, parent) => ({ name, path, parent, children: new Map(), measured: 0, bound: 0, ops: 0 });
  const root = module("the step", null, null);
  const nodes = model.modules.map((path) => {
    if (!path) {
      if (!root.children.has(OUTSIDE)) root.children.set(OUTSIDE, module(OUTSIDE, null, root));
      return root.children.get(OUTSIDE);
    }
    let at = root;
    for (const part of path.split(".")) {
      if (!at.children.has(part)) at.children.set(part, module(part, at === root ? part : `${at.path}.${part}`, at));
      at = at.children.get(part);
    }
    return at;
  });
  for (let op = 0; op < model.opCount; op += 1) {
    const node = nodes[model.module[op]];
    const kind = model.kind[op];
    node.ops += 1;
    node.measured += model.measured[op];
    node.bound += model.modeled[kind] ? model.bound[kind] : 0;
  }
  const all = [root];
  for (let i = 0; i < all.length; i += 1) all[i].children.forEach((child) => all.push(child));
  for (let i = all.length - 1; i > 0; i -= 1) {
    all[i].parent.measured += all[i].measured;
    all[i].parent.bound += all[i].bound;
    all[i].parent.ops += all[i].ops;
  }
  for (const node of all) node.children = [...node.children.values()].filter((child) => child.measured > 0);
  return root;
}

// The ops of each group, one group after the other.
function membersOf(model, ops) {
  const all = ops || Uint32Array.from(model.kind.keys());
  const starts = new Uint32Array(model.whatCount + 2);
  for (const op of all) starts[model.whatOf[op] + 2] += 1;
  for (let i = 1; i < starts.length; i += 1) starts[i] += starts[i - 1];
  const found = new Uint32Array(all.length);
  for (const op of all) {
    const what = model.whatOf[op];
    found[starts[what + 1]] = op;
    starts[what + 1] += 1;
  }
  return { starts, ops: found };
}
