// The timeline's data: what ran on each stream, and when nothing ran.

function readTimeline(model) {
  const data = model.timeline;
  const start = sumsOf(data.start).map((value) => value * 1e-9);
  const length = numbersOf(data.seconds, 1e-9);
  const op = sumsOf(data.op);
  const stream = columnOf(data.stream);
  const name = textsOf(data.name);
  const communication = columnOf(data.communication);
  const merged = columnOf(data.merged);
  const streams = [...new Set(stream)].sort((a, b) => a - b);
  const phases = model.phase.values;
  const color = Uint8Array.from(start, (_, at) => {
    if (communication[at]) return COMMUNICATION;
    if (op[at] < 0 || op[at] >= model.opCount) return UNKNOWN;
    return PHASES.indexOf(phases[model.phase.index[model.whatOf[op[at]]]]) + 1 || UNKNOWN;
  });
  const lanes = streams.map((number) => {
    const spans = [];
    stream.forEach((found, at) => {
      if (found === number) spans.push(at);
    });
    return { stream: number, spans: Uint32Array.from(spans) };
  });
  let end = 0;
  for (let at = 0; at < start.length; at += 1) end = Math.max(end, start[at] + length[at]);
  const gaps = readGaps(data.gaps);
  const last = gaps.length ? gaps[gaps.length - 1] : { start: 0, length: 0 };
  return { start, length, op, name, merged, color, lanes, gaps, end: Math.max(end, last.start + last.length) };
}

const PHASES = ["forward", "backward", "optimizer"];
const UNKNOWN = 4;
const COMMUNICATION = 5;
const SPAN_CLASSES = ["", "forward", "backward", "optimizer", "unknown", "communication"];

function readGaps(data) {
  const start = sumsOf(data.start);
  const length = numbersOf(data.seconds, 1e-9);
  const cause = columnOf(data.cause);
  const where = columnOf(data.where);
  return cause.map((text, at) => ({ start: start[at] * 1e-9, length: length[at], cause: text, where: where[at] }));
}

// The last of `places` that begins at or before a time; -1 where none does.
function lastBefore(starts, places, time) {
  let low = 0;
  let high = places.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (starts[places[middle]] <= time) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}
