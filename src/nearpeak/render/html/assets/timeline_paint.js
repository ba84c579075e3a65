// How the timeline is painted: ruler, spans and the hatching of gaps.

const LANE = 32;
const RULER = 18;

// The colors of the theme, as a canvas needs them.
function canvasColors(root) {
  const found = {};
  for (const name of [...SPAN_CLASSES.filter(Boolean), "idle", "ink", "faint", "card"]) {
    const probe = make("span", { class: `probe p-${name}` });
    root.append(probe);
    found[name] = getComputedStyle(probe).color;
    probe.remove();
  }
  return found;
}

function hatched(context, colors, scale) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6 * scale;
  const pen = tile.getContext("2d");
  pen.scale(scale, scale);
  pen.strokeStyle = colors.idle;
  pen.lineWidth = 1;
  for (const from of [-3, 3, 9]) {
    pen.beginPath();
    pen.moveTo(from - 4, 7);
    pen.lineTo(from + 4, -1);
    pen.stroke();
  }
  const pattern = context.createPattern(tile, "repeat");
  pattern.setTransform(new DOMMatrix().scale(1 / scale));
  return pattern;
}

// Neighbors that fall into the same pixel are one rectangle, so that a strip of 100,000 spans is drawn at once.
function drawLane(context, data, lane, top, range, pixels, colors, name) {
  const first = Math.max(0, lastBefore(data.start, lane.spans, range.from));
  let open = null;
  const flush = () => {
    if (!open) return;
    context.fillStyle = colors[SPAN_CLASSES[open.color]];
    context.fillRect(open.x, top + 3, Math.max(0.6, open.end - open.x), LANE - 6);
    const left = Math.max(0, open.x);
    const room = Math.min(open.end, (range.to - range.from) * pixels) - left - 8;
    if (open.span === null || room < 24) return;
    context.fillStyle = colors.card;
    context.fillText(fitted(name(open.span), room, 11), left + 4, top + LANE / 2 + 4);
  };
  for (let i = first; i < lane.spans.length; i += 1) {
    const span = lane.spans[i];
    if (data.start[span] > range.to) break;
    const x = (data.start[span] - range.from) * pixels;
    const end = x + data.length[span] * pixels;
    const gap = end - x > 3 ? 0.5 : 0; // long ones are told apart
    if (open && open.color === data.color[span] && x - open.end < 0.4 && end - x < 3 && open.end - open.x < 400) {
      open.end = Math.max(open.end, end);
      open.span = null; // several
      continue;
    }
    flush();
    open = { x, end: end - gap, color: data.color[span], span };
  }
  flush();
}

function drawRuler(context, range, width, height, colors) {
  const length = range.to - range.from;
  const rough = (length * 90) / width;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
  context.font = "11px system-ui, sans-serif";
  for (let number = Math.ceil(range.from / step); number * step <= range.to; number += 1) {
    const x = ((number * step - range.from) / length) * width;
    context.fillStyle = colors.faint;
    context.fillRect(x, 0, 1, height);
    context.fillStyle = colors.ink;
    const digits = Math.min(8, Math.max(3, Math.ceil(Math.log10(Math.abs(number * step) / step || 1)) + 1));
    context.fillText(number === 0 ? "0" : seconds(number * step, digits).replace(/\.0+ /, " "), x + 3, 11);
  }
}
