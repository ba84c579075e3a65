// One step as a strip: what ran on each stream, and hatched what did not. Drawn on a canvas, as there are many spans.

const SHOWN_GAPS = 8;

function timeline(model, root, toolbar, list, goTo) {
  const data = readTimeline(model);
  const canvas = make("canvas", { class: "timeline", tabindex: "0", role: "img", "aria-label": timelineSummary(data) });
  root.append(canvas);
  const height = RULER + LANE * data.lanes.length + 2;
  const full = Math.max(data.end, 1e-9);
  const range = { from: 0, to: data.end };
  const largest = data.gaps.map((_, at) => at).sort((a, b) => data.gaps[b].length - data.gaps[a].length);
  const toured = largest.slice(0, 50).sort((a, b) => a - b);
  let width = 0;
  let colors = null;
  let stop = -1;

  function draw() {
    if (!width) return;
    const scale = window.devicePixelRatio || 1;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.height = `${height}px`;
    colors = colors || canvasColors(root);
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    drawRuler(context, range, width, height, colors);
    const hatch = hatched(context, colors, scale);
    const pixels = width / (range.to - range.from);
    for (const gap of data.gaps) {
      if (gap.start > range.to || gap.start + gap.length < range.from) continue;
      const wide = gap.length * pixels;
      if (wide < 0.75) continue;
      context.fillStyle = hatch;
      context.fillRect((gap.start - range.from) * pixels, RULER, wide, height - RULER);
    }
    data.lanes.forEach((lane, number) =>
      drawLane(context, data, lane, RULER + number * LANE, range, pixels, colors, title),
    );
  }

  function zoom(factor, event) {
    const share = event ? (event.clientX - canvas.getBoundingClientRect().left) / width : 0.5;
    const middle = range.from + share * (range.to - range.from);
    const length = Math.min(full, Math.max(full * 1e-6, (range.to - range.from) / factor));
    setRange(middle - share * length, length);
  }

  function setRange(from, length) {
    range.from = Math.max(0, Math.min(data.end - length, from));
    range.to = range.from + length;
    draw();
  }

  function pan(share) {
    setRange(range.from + share * (range.to - range.from), range.to - range.from);
  }

  function reset() {
    setRange(0, full);
  }

  // What is at a place of the canvas: a span, or a gap.
  function at(event) {
    const box = canvas.getBoundingClientRect();
    const time = range.from + ((event.clientX - box.left) / width) * (range.to - range.from);
    const slack = (2 * (range.to - range.from)) / width;
    const lane = data.lanes[Math.floor((event.clientY - box.top - RULER) / LANE)];
    if (lane) {
      const place = lastBefore(data.start, lane.spans, time);
      const span = lane.spans[Math.max(0, place)];
      if (
        span !== undefined &&
        time <= data.start[span] + data.length[span] + slack &&
        time >= data.start[span] - slack
      )
        return { span };
    }
    const gap = data.gaps.find((each) => each.start <= time && time <= each.start + each.length);
    return gap ? { gap } : null;
  }

  function gapLines(gap) {
    return [`idle: ${gap.cause}`, `${seconds(gap.length)} at ${seconds(gap.start)}`, gap.where];
  }

  function title(span) {
    const op = data.op[span];
    return op >= 0 && op < model.opCount
      ? whatText(model, "short", model.whatOf[op])
      : data.name.values[data.name.index[span]];
  }

  function lines(found) {
    if (found.gap) return gapLines(found.gap);
    const { span } = found;
    const op = data.op[span];
    const kernel = data.name.values[data.name.index[span]];
    const known = op >= 0 && op < model.opCount;
    const what = known ? model.whatOf[op] : -1;
    const several = data.merged[span] > 1 ? `, ${counted(data.merged[span], "kernel")}` : "";
    return [
      known ? `${whatText(model, "short", what)} (${whatText(model, "phase", what)})` : "a kernel without an op",
      `${seconds(data.length[span])} at ${seconds(data.start[span])}${several}`,
      fitted(kernel, 480),
      known ? fitted(model.modules[model.module[op]], 480) : "",
      known ? whatText(model, "source", what) : "",
    ];
  }

  function showGap(gap) {
    const length = Math.min(full, Math.max(gap.length * 6, full * 1e-6));
    setRange(gap.start + gap.length / 2 - length / 2, length);
    say(gapLines(gap).filter(Boolean).join(", "));
  }

  canvas.addEventListener("pointermove", (event) => {
    const found = at(event);
    if (found) showTip(lines(found), event.clientX, event.clientY);
    else hideTip();
  });
  canvas.addEventListener("pointerleave", hideTip);
  canvas.addEventListener("click", (event) => {
    const found = at(event);
    if (!found || found.span === undefined) return;
    const op = data.op[found.span];
    if (op >= 0 && op < model.opCount) {
      hideTip();
      goTo(model.whatOf[op], op);
    }
  });
  canvas.addEventListener("keydown", (event) => {
    if (event.key === "ArrowLeft") pan(-0.2);
    else if (event.key === "ArrowRight") pan(0.2);
    else if (event.key === "+" || event.key === "=" || event.key === "ArrowUp") zoom(1.5);
    else if (event.key === "-" || event.key === "ArrowDown") zoom(1 / 1.5);
    else if (event.key === "0" || event.key === "Home") reset();
    else if ((event.key === "n" || event.key === "p") && toured.length) {
      stop = (stop + (event.key === "n" ? 1 : -1) + toured.length) % toured.length;
      showGap(data.gaps[toured[stop]]);
    } else return;
    event.preventDefault();
  });
  onWheelZoom(canvas, zoom);
  onDrag(canvas, (x) => {
    hideTip();
    setRange(range.from - (x / width) * (range.to - range.from), range.to - range.from);
  });
  toolbar.append(
    button("+", () => zoom(1.6), { "aria-label": "Zoom in", title: "Zoom in" }),
    button("−", () => zoom(1 / 1.6), { "aria-label": "Zoom out", title: "Zoom out" }),
    button("Reset", reset),
    make(
      "span",
      { class: "legend" },
      ...[...PHASES, "communication", "idle"]
        .filter((name) => (name === "idle" ? data.gaps.length : data.color.includes(SPAN_CLASSES.indexOf(name))))
        .map((name) => make("span", { class: `key s-${name}`, text: name })),
    ),
  );
  if (largest.length) {
    list.append(make("h3", { text: "Longest gaps" }));
    list.append(
      make(
        "ol",
        { class: "gaps" },
        ...largest.slice(0, SHOWN_GAPS).map((number) => {
          const gap = data.gaps[number];
          return make(
            "li",
            {},
            button(`${seconds(gap.length)} ${gap.cause}`, () => showGap(gap)),
            make("span", { class: "place", text: gap.where }),
          );
        }),
      ),
    );
  }
  onWidth(root, (found) => {
    width = found;
    draw();
  });
  return {
    resample: () => {
      colors = null;
      draw();
    },
  };
}

function timelineSummary(data) {
  const idle = data.gaps.reduce((sum, gap) => sum + gap.length, 0);
  return (
    `Timeline of the profiled step: ${counted(data.start.length, "span")} on ${counted(data.lanes.length, "stream")}, ` +
    `${seconds(data.end)}, idle for ${seconds(idle)}. ` +
    "Arrow keys move, plus and minus zoom, n goes to the next gap."
  );
}
