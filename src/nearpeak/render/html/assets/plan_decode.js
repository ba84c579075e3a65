// The roofline of one decode step: reading weights and cache against multiplying.

function decodeStep(model, choice) {
  const windowed = model.window ? Math.min(choice.context, model.window) : 0;
  const cache = choice.batch * (choice.context * model.cache_full + windowed * model.cache_window);
  const reading = (model.weights + cache) / (model.bandwidth * choice.share / 100);
  const work = choice.batch * (model.flops + choice.context * model.flops_full + windowed * model.flops_window);
  const multiplying = work / (model.peak * choice.share / 100);
  return { cache, reading, multiplying, seconds: Math.max(reading, multiplying) };
}

// The batch at which multiplying takes as long as reading; null where each sequence brings more to read than to do.
function decodeCrossing(model, choice) {
  const one = decodeStep(model, { ...choice, batch: 1 });
  const none = decodeStep(model, { ...choice, batch: 0 });
  const gained = one.multiplying - (one.reading - none.reading);
  return gained > 0 ? none.reading / gained : null;
}

function decodeControls(model) {
  const start = model.start;
  return [
    picker("batch", "Sequences that decode together", model.choices.batch, start.batch),
    picker("context", "Tokens of context", model.choices.context, start.context),
    picker("share", "Percent of the datasheet's rates", model.choices.share, start.share),
  ];
}

function decodeAnswer(model, choice) {
  const step = decodeStep(model, choice);
  const room = step.cache <= model.cache_room;
  const limit = step.reading >= step.multiplying ? "memory" : "compute";
  const crossing = decodeCrossing(model, choice);
  const verdict = `${seconds(step.seconds)} a step, limited by ${limit}: ${fixed(choice.batch / step.seconds, 0)} tokens/s`;
  say(verdict);
  return [
    make("p", { class: "verdict-line", id: "verdict", text: verdict }),
    stackBar([["reading", step.reading]], null, step.seconds, 0),
    stackBar([["multiplying", step.multiplying]], null, step.seconds, 1),
    make("div", { class: "legend" },
      make("span", { class: "key c-0", text: `reading weights and cache ${seconds(step.reading)}` }),
      make("span", { class: "key c-1", text: `multiplying ${seconds(step.multiplying)}` })),
    make("p", { text: crossing === null
      ? "At this context decode stays limited by memory at every batch."
      : `At this context decode stops being limited by memory at ${fixed(crossing, 0)} sequences.` }),
    make("p", { class: `verdict-line ${room ? "good" : "bad"}`, text:
      `KV cache: ${fixed(step.cache / GB, 1)} GB of the ${fixed(model.cache_room / GB, 1)} GB that are left on a GPU${room ? "" : ": does not fit"}` }),
  ];
}
