// The frame of the roofline: its axes, its grid, and the roofs with their names.

const MARGIN = { left: 58, right: 14, top: 14, bottom: 42 };
const LABELS = 250; // pixels beside the plot, where it is wide enough for both

// Axes around the points that have nearly all of the time, and around the roofs over them.
function rooflineAxes(points, bandwidths, engines, width, height) {
  const total = points.reduce((sum, point) => sum + point.measured, 0);
  let reached = 0;
  const kept = points.filter((point) => {
    reached += point.measured;
    return reached <= 0.999 * total || point === points[0];
  });
  const ridges = bandwidths.length && engines.length ? engines.map((roof) => roof.value / bandwidths[0].value) : [];
  const xs = [...kept.map((point) => point.intensity), ...(ridges.length ? [Math.max(...ridges)] : [])];
  const highest = Math.max(...kept.map((point) => point.rate), ...engines.map((roof) => roof.value));
  const lowest = Math.max(highest * 1e-7, Math.min(...kept.map((point) => point.rate)));
  return {
    x: logAxis(Math.min(...xs) / 3, Math.max(...xs) * 3, MARGIN.left, width - MARGIN.right),
    y: logAxis(lowest / 3, highest * 2, height - MARGIN.bottom, MARGIN.top),
  };
}

function drawFrame(layer, axes) {
  clear(layer);
  for (const value of axes.x.ticks()) {
    const x = axes.x.place(value);
    layer.append(makeSvg("line", { x1: x, x2: x, y1: axes.y.start, y2: axes.y.end, class: "grid-line" }));
    layer.append(makeSvg("text", { x, y: axes.y.start + 16, "text-anchor": "middle", text: tickText(value, false) }));
  }
  for (const value of axes.y.ticks()) {
    const y = axes.y.place(value);
    layer.append(makeSvg("line", { x1: axes.x.start, x2: axes.x.end, y1: y, y2: y, class: "grid-line" }));
    layer.append(makeSvg("text", { x: axes.x.start - 6, y: y + 4, "text-anchor": "end", text: tickText(value, true) }));
  }
  const middle = (axes.y.start + axes.y.end) / 2;
  layer.append(
    makeSvg("text", {
      x: (axes.x.start + axes.x.end) / 2,
      y: axes.y.start + 34,
      "text-anchor": "middle",
      class: "axis-name",
      text: "FLOP per byte",
    }),
  );
  layer.append(
    makeSvg("text", {
      x: 12,
      y: middle,
      "text-anchor": "middle",
      class: "axis-name",
      transform: `rotate(-90 12 ${middle})`,
      text: "FLOP/s",
    }),
  );
}

function drawRoofs(layer, labels, axes, bandwidths, engines) {
  clear(layer);
  clear(labels);
  const top = engines.length ? engines[0].value : axes.y.value(axes.y.end);
  const widest = bandwidths.reduce((most, roof) => Math.max(most, roof.value), 0);
  for (const roof of engines) {
    const from = widest ? Math.max(axes.x.place(roof.value / widest), axes.x.start) : axes.x.start;
    const y = axes.y.place(roof.value);
    layer.append(makeSvg("line", { x1: from, x2: axes.x.end, y1: y, y2: y, class: `roof ${roof.kind}` }));
  }
  labelEngines(labels, axes, engines);
  for (const roof of bandwidths) {
    const begin = Math.min(axes.x.value(axes.x.start), top / roof.value) / 10;
    const points = [begin, top / roof.value].map((x) => [axes.x.place(x), axes.y.place(x * roof.value)]);
    layer.append(
      makeSvg("line", {
        x1: points[0][0],
        y1: points[0][1],
        x2: points[1][0],
        y2: points[1][1],
        class: `roof ${roof.kind}`,
      }),
    );
    const x = Math.max(axes.x.value(axes.x.start + 30), axes.y.value(axes.y.start - 30) / roof.value);
    const [left, up] = [axes.x.place(x), axes.y.place(x * roof.value)];
    if (x > top / roof.value || up < axes.y.end) continue;
    const angle = (Math.atan2(points[1][1] - points[0][1], points[1][0] - points[0][0]) * 180) / Math.PI;
    labels.append(
      makeSvg("text", {
        x: left,
        y: up - 6,
        transform: `rotate(${angle.toFixed(1)} ${left.toFixed(1)} ${up.toFixed(1)})`,
        class: `roof-label ${roof.kind}`,
        text: `${roof.name} ${quantity(roof.value, "B/s")}`,
      }),
    );
  }
}

// Names of the horizontal roofs: beside the plot with a line to each; the main ones above their lines where it is narrow.
function labelEngines(labels, axes, engines) {
  const shown = engines
    .map((roof) => ({ roof, y: axes.y.place(roof.value) }))
    .filter(({ y }) => y >= axes.y.end && y <= axes.y.start);
  const beside = axes.x.end + LABELS <= Number(labels.ownerSVGElement.getAttribute("viewBox").split(" ")[2]);
  const named = beside ? shown : shown.filter(({ roof }) => roof.kind === "matrix");
  const places = spread(
    named.map(({ y }) => y + (beside ? 4 : -4)),
    beside ? 14 : 12,
  );
  named.forEach(({ roof, y }, at) => {
    const text = `${roof.name} ${quantity(roof.value, "FLOP/s")}`;
    if (!beside) {
      labels.append(
        makeSvg("text", {
          x: axes.x.end - 4,
          y: places[at],
          "text-anchor": "end",
          class: `roof-label ${roof.kind}`,
          text,
        }),
      );
      return;
    }
    labels.append(makeSvg("path", { d: `M${axes.x.end} ${y} L${axes.x.end + 14} ${places[at] - 4}`, class: "leader" }));
    labels.append(
      makeSvg("text", {
        x: axes.x.end + 17,
        y: places[at],
        class: `roof-label ${roof.kind}`,
        text: fitted(text, LABELS - 20, 11),
      }),
    );
  });
}

// Places as near as can be to those wanted, in their order, none nearer than `least` to the next.
function spread(wanted, least) {
  const blocks = [];
  for (const place of wanted) {
    blocks.push({ sum: place, count: 1, middle: place });
    while (blocks.length > 1) {
      const [a, b] = blocks.slice(-2);
      if (b.middle - a.middle >= ((a.count + b.count) / 2) * least) break;
      const joined = { sum: a.sum + b.sum, count: a.count + b.count };
      blocks.splice(-2, 2, { ...joined, middle: joined.sum / joined.count });
    }
  }
  return blocks.flatMap((block) =>
    Array.from({ length: block.count }, (_, at) => block.middle + (at - (block.count - 1) / 2) * least),
  );
}
