// Memory of a training job: the arithmetic of nearpeak.plan.training.memory, for what the sliders change.

const GB = 1e9;

// Layers of each stage: where they do not come out even, the last stage is short, then the first, then others.
function stageSizes(model, pp) {
  const most = Math.ceil(model.mixers.length / pp);
  const sizes = Array(pp).fill(most);
  const missing = pp * most - model.mixers.length;
  const last = Math.min(missing, model.output_layers, Math.max(1, most - 1));
  sizes[pp - 1] -= last;
  const order = [0, ...Array.from({ length: Math.max(0, pp - 2) }, (_, place) => pp - 2 - place), pp - 1];
  for (const stage of order.slice(0, missing - last)) sizes[stage] -= 1;
  return sizes;
}

// How many layers of each kind a stage has.
function kindsOf(model, pp, index) {
  const sizes = stageSizes(model, pp);
  const start = sizes.slice(0, index).reduce((sum, size) => sum + size, 0);
  const end = start + sizes[index];
  const found = {};
  for (const letter of model.mixers.slice(start, end) + model.feeds.slice(start, end)) {
    if (letter !== "-") found[letter] = (found[letter] ?? 0) + 1;
  }
  return [Object.entries(found), end - start];
}

// Weights of the largest layer, and of one matrix of each shape.
function layerWeights(model, choice, kinds) {
  const has = (letter) => kinds.some(([kind]) => kind === letter);
  const of = (letter) => (has(letter) ? model.weights[letter] : 0);
  const attention = Math.max(of("A"), of("W"), of("C"));
  const experts = has("E") ? (model.experts * model.expert) / (choice.ep * model.etp) : 0;
  const largest = Math.max(attention, of("M")) / choice.tp + Math.max(of("D") / choice.tp, of("E") / choice.tp + experts);
  const shapes = (attention + of("M") + of("D") + of("E")) / choice.tp + (has("E") ? model.expert / model.etp : 0);
  return [largest, shapes, experts];
}

function memoryStage(model, choice, index) {
  const kept = model.kept[choice.recompute][choice.tp];
  const { pp, tp, ep } = choice;
  const [kinds, layers] = kindsOf(model, pp, index);
  const [largest, shapes, expertLayer] = layerWeights(model, choice, kinds);
  const summed = (values) => kinds.reduce((sum, [kind, number]) => sum + number * values[kind], 0);
  const [first, last] = [index === 0, index === pp - 1];
  let dense = summed(model.weights) / tp + kinds.reduce((sum, [, number]) => sum + number, 0) * model.norm;
  if (first) dense += model.embedding / tp;
  if (last) dense += (model.output + (pp > 1 ? model.tied_copy : 0)) / tp + model.final_norm;
  const experts = (kinds.find(([kind]) => kind === "E")?.[1] ?? 0) * expertLayer;
  const dp = choice.gpus / (tp * pp * model.cp);
  const ranks = choice.sharding === "none" ? 1 : dp * model.cp;
  const expertRanks = choice.sharding === "none" ? 1 : Math.max(1, Math.min(choice.gpus / (ep * model.etp * pp), ranks));
  const mine = dense / ranks + experts / expertRanks;
  const whole = dense + experts;
  const tokens = (choice.microbatch * choice.sequence) / model.cp;
  const held = Math.min(pp - index, choice.microbatches);
  const parts = {
    parameters: (choice.sharding === "zero3" ? mine : whole) * model.bytes.parameters,
    gradients: (choice.sharding === "none" || choice.sharding === "zero1" ? whole : mine) * model.bytes.gradients * model.trainable,
    optimizer: mine * model.bytes.optimizer * model.trainable,
    activations: held * tokens * summed(kept.held) + (kept.again ? (tokens * summed(kept.again)) / layers : 0),
    logits: last ? model.logits * tokens / tp : 0,
  };
  let wires = 0;
  if (tp > 1) wires += model.gathered * tokens;
  if (ep > 1) wires += (model.dispatched * tokens) / (model.sequence_parallel ? tp : 1);
  if (choice.sharding === "zero3" && ranks > 1) wires += 6 * largest;
  else if (choice.sharding === "none" && model.copied_buckets && dp * model.cp > 1) wires += model.bytes.parameters * whole * model.trainable;
  else if (dp * model.cp > 1) wires += model.buckets;
  let workspace = model.workspace + model.running * tokens;
  if (last) workspace += (2 * model.output_placeholder) / tp;
  if (model.placeholders && choice.sharding !== "zero3") workspace += 2 * shapes;
  const states = parts.parameters + parts.gradients + parts.optimizer;
  const allocated = states + parts.activations + parts.logits + wires + workspace;
  const slack = model.slack * (allocated - states);
  parts["buffers, context, slack"] = wires + workspace + slack + model.context[choice.gpus > 1 ? 1 : 0];
  return parts;
}

function total(parts) {
  return Object.values(parts).reduce((sum, value) => sum + value, 0);
}

// The fullest stage.
function memoryPeak(model, choice) {
  const stages = Array.from({ length: choice.pp }, (_, index) => memoryStage(model, choice, index));
  return stages.reduce((fullest, stage) => (total(stage) > total(fullest) ? stage : fullest));
}

// Why a choice cannot be, or null.
function memoryProblem(model, choice) {
  const ranks = choice.tp * choice.pp * model.cp;
  if (choice.gpus % ranks) return `tp x cp x pp = ${ranks} does not divide ${choice.gpus} GPUs`;
  if (choice.ep > 1 && choice.gpus % (choice.ep * model.etp * choice.pp)) {
    return `ep x etp x pp = ${choice.ep * model.etp * choice.pp} does not divide ${choice.gpus} GPUs`;
  }
  if (choice.sequence % (model.cp * (model.sequence_parallel ? choice.tp : 1))) {
    return `tp x cp cut a sequence of ${choice.sequence} tokens unevenly`;
  }
  return null;
}

function memoryControls(model) {
  const start = model.start;
  const controls = [
    picker("gpus", "GPUs", model.choices.gpus, start.gpus),
    picker("tp", "Tensor parallel", model.choices.tp, start.tp),
    picker("pp", "Pipeline stages", model.choices.pp, start.pp),
  ];
  if (model.choices.ep.length > 1) controls.push(picker("ep", "Expert parallel", model.choices.ep, start.ep));
  controls.push(
    picker("microbatch", "Microbatch, sequences", model.choices.microbatch, start.microbatch),
    picker("microbatches", "Microbatches per step", model.choices.microbatches, start.microbatches),
    picker("sequence", "Tokens of a sequence", model.choices.sequence, start.sequence),
    chooser("sharding", "Sharding", ["none", "zero1", "zero2", "zero3"], start.sharding),
    chooser("recompute", "Recompute", Object.keys(model.kept), start.recompute),
  );
  return controls;
}

function memoryAnswer(model, picked) {
  const choice = { ep: 1, ...picked }; // a model without experts has no slider for them
  const problem = memoryProblem(model, choice);
  if (problem) return [make("p", { class: "verdict-line bad", text: `Not legal: ${problem}.` })];
  const parts = memoryPeak(model, choice);
  const needed = total(parts);
  const capacity = model.capacity;
  const fits = capacity === null ? "" : needed <= capacity ? "good" : "bad";
  const verdict =
    capacity === null
      ? `${fixed(needed / GB, 1)} GB on the fullest GPU`
      : `${fixed(needed / GB, 1)} GB on the fullest GPU: ${needed <= capacity ? "fits" : "does not fit"} ${fixed(capacity / GB, 1)} GB`;
  say(verdict);
  return [
    make("p", { class: `verdict-line ${fits}`, id: "verdict", text: verdict }),
    stackBar(Object.entries(parts), capacity),
    make("div", { class: "legend" }, ...Object.entries(parts).map(([name, value], number) =>
      make("span", { class: `key c-${number}`, text: `${name} ${fixed(value / GB, 1)} GB` }))),
  ];
}
