// One decode step, looked up in what the planner computed for each batch and context.

function decodeStep(model, choice) {
  const row = model.choices.batch.indexOf(choice.batch);
  const column = model.choices.context.indexOf(choice.context);
  const parts = model.steps[row][column].map((value, number) => [model.parts[number], value]);
  return {
    parts,
    seconds: parts.reduce((sum, [, value]) => sum + value, 0),
    limit: model.limits[row][column],
    cache: choice.batch * model.cache[column],
  };
}

function decodeControls(model) {
  const start = model.start;
  return [
    picker("batch", "Sequences that decode together", model.choices.batch, start.batch),
    picker("context", "Tokens of context", model.choices.context, start.context),
  ];
}

function decodeAnswer(model, choice) {
  const step = decodeStep(model, choice);
  const room = step.cache <= model.cache_room;
  const verdict = `${seconds(step.seconds)} a step, limited by ${step.limit}: ${fixed(choice.batch / step.seconds, 0)} tokens/s`;
  say(verdict);
  const shown = step.parts.filter(([, value]) => value > 0);
  return [
    make("p", { class: "verdict-line", id: "verdict", text: verdict }),
    stackBar(shown, null, step.seconds),
    make("div", { class: "legend" },
      ...shown.map(([name, value], number) => make("span", { class: `key c-${number}`, text: `${name} ${seconds(value)}` }))),
    make("p", { class: `verdict-line ${room ? "good" : "bad"}`, text:
      `KV cache: ${fixed(step.cache / GB, 1)} GB of the ${fixed(model.cache_room / GB, 1)} GB that are left on a GPU${room ? "" : ": does not fit"}` }),
  ];
}
