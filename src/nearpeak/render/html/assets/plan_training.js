// A training job near the planned one, looked up in what the planner computed for each choice.

const GB = 1e9;
const LABELS = {
  gpus: "GPUs", tp: "Tensor parallel", pp: "Pipeline stages", ep: "Expert parallel", microbatch: "Microbatch, sequences",
  sharding: "Sharding", recompute: "Recompute",
};

// What the planner said to a choice: a problem, or memory by part (in GB), seconds of a step and its tokens where it has them.
function trainingCell(model, choice) {
  const place = Object.entries(model.choices).reduce(
    (sum, [name, values]) => sum * values.length + Math.max(0, values.indexOf(choice[name] ?? values[0])), 0);
  const cell = model.cells[place];
  if (!Array.isArray(cell)) return { problem: model.problems[cell] };
  const parts = model.parts.map((name, number) => [name, GB * cell[number]]);
  return {
    parts,
    needed: parts.reduce((sum, [, value]) => sum + value, 0),
    seconds: cell[model.parts.length] ?? null,
    tokens: cell[model.parts.length + 1] ?? null,
  };
}

function trainingControls(model) {
  return Object.entries(model.choices)
    .filter(([, values]) => values.length > 1)
    .map(([name, values]) =>
      (typeof values[0] === "number" ? picker : chooser)(name, LABELS[name], values, model.start[name]));
}

function trainingAnswer(model, choice) {
  const cell = trainingCell(model, { ...model.start, ...choice });
  if (cell.problem) return [make("p", { class: "verdict-line bad", id: "verdict", text: `Not legal: ${cell.problem}` })];
  const capacity = model.capacity;
  const fits = capacity === null || cell.needed <= capacity;
  let verdict = `${fixed(cell.needed / GB, 1)} GB on the fullest GPU`;
  if (capacity !== null) verdict += `: ${fits ? "fits" : "does not fit"} ${fixed(capacity / GB, 1)} GB`;
  if (cell.seconds !== null) {
    verdict += `; ${seconds(cell.seconds)} a step, ${count(Math.round(cell.tokens / cell.seconds))} tokens/s`;
  }
  say(verdict);
  return [
    make("p", { class: `verdict-line ${capacity === null ? "" : fits ? "good" : "bad"}`, id: "verdict", text: verdict }),
    stackBar(cell.parts, capacity),
    make("div", { class: "legend" }, ...cell.parts.map(([name, value], number) =>
      make("span", { class: `key c-${number}`, text: `${name} ${fixed(value / GB, 1)} GB` }))),
  ];
}
