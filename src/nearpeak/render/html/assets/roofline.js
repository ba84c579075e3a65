// The roofline: groups of equal ops as circles by FLOP per byte and FLOP/s, below the roofs of the machine.

const MOST_CIRCLES = 2000;
const LARGEST_CIRCLE = 34;

// The groups that can be drawn, the longest first, and what cannot be.
function rooflinePoints(model) {
  const groups = groupsOf(model, null);
  const points = [];
  const left = { ops: 0, measured: 0 };
  for (const what of groups.what) {
    const measured = groups.measured[what];
    if (!(measured > 0)) continue;
    if (groups.flops[what] > 0 && groups.bytes[what] > 0) {
      points.push({
        what,
        measured,
        ops: groups.ops[what],
        bound: groups.bound[what],
        known: groups.known[what] > 0,
        intensity: groups.flops[what] / groups.bytes[what],
        rate: groups.flops[what] / measured,
        limiter: limiterOf(model, groups.kind[what]),
      });
    } else {
      left.ops += groups.ops[what];
      left.measured += measured;
    }
  }
  points.sort((a, b) => b.measured - a.measured);
  return { points: points.slice(0, MOST_CIRCLES), more: Math.max(0, points.length - MOST_CIRCLES), left };
}

function roofline(model, root, toolbar, goTo) {
  const { points, more, left } = rooflinePoints(model);
  const bandwidths = model.roofs.filter((roof) => roof.kind === "memory" || roof.kind === "cache");
  const engines = model.roofs.filter((roof) => roof.kind === "matrix" || roof.kind === "vector");
  const parts = [`${counted(points.length, "group")} of equal ops.`];
  if (more) parts.push(`${counted(more, "smaller group")} are not drawn.`);
  if (left.ops)
    parts.push(
      `${counted(left.ops, "op")} without FLOPs, ${seconds(left.measured)} ` +
        `(${percent(left.measured / model.wall)} of the step), cannot be on it.`,
    );
  root.parentElement.append(make("p", { class: "note", text: parts.join(" ") }));
  if (!points.length) {
    root.remove();
    return;
  }
  const svg = makeSvg("svg", {
    class: "plot",
    role: "group",
    "aria-label":
      `Roofline: ${points.length} groups of ops by FLOP per byte and FLOP per second. ` +
      "Arrow keys go from one to the next, Enter to its row in the table.",
  });
  root.append(svg);
  const largest = points[0].measured;
  let axes = null;
  let circles = [];
  let current = 0;

  function size(point) {
    return Math.max(2.5, LARGEST_CIRCLE * Math.sqrt(point.measured / largest));
  }

  function build(width) {
    const height = Math.max(340, Math.min(560, width * 0.62));
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("height", height);
    axes = rooflineAxes(points, bandwidths, engines, width - (width > 900 && engines.length ? LABELS : 0), height);
    clear(svg);
    const clip = makeSvg(
      "clipPath",
      { id: "roofline-clip" },
      makeSvg("rect", {
        x: MARGIN.left,
        y: MARGIN.top,
        width: axes.x.end - MARGIN.left,
        height: height - MARGIN.top - MARGIN.bottom,
      }),
    );
    svg.append(
      makeSvg("defs", {}, clip),
      makeSvg("g", { class: "frame" }),
      makeSvg("g", { class: "roofs", "clip-path": "url(#roofline-clip)" }),
    );
    const layer = makeSvg("g", { class: "circles", "clip-path": "url(#roofline-clip)" });
    circles = points.map((point, number) =>
      makeSvg("circle", {
        r: size(point).toFixed(1),
        class: limiterClass(point.limiter),
        tabindex: number === current ? "0" : "-1",
        role: "button",
        "data-point": number,
        "aria-label": lines(point).join(", "),
      }),
    );
    layer.append(...circles);
    svg.append(layer, makeSvg("g", { class: "roof-labels" }));
    draw();
  }

  function draw() {
    drawFrame(svg.querySelector(".frame"), axes);
    drawRoofs(svg.querySelector(".roofs"), svg.querySelector(".roof-labels"), axes, bandwidths, engines);
    circles.forEach((circle, number) => {
      circle.setAttribute("cx", axes.x.place(points[number].intensity).toFixed(1));
      circle.setAttribute("cy", axes.y.place(points[number].rate).toFixed(1));
    });
  }

  function lines(point) {
    return [
      `${whatText(model, "short", point.what)} (${whatText(model, "phase", point.what)})`,
      `${seconds(point.measured)} in ${counted(point.ops, "op")}, ${percent(point.measured / model.wall)} of the step`,
      `${quantity(point.rate, "FLOP/s")} at ${significant(point.intensity)} FLOP per byte`,
      point.known && point.bound > 0
        ? `${significant(point.measured / point.bound, 2)} x its bound, limited by ${point.limiter}`
        : "without a bound",
      whatText(model, "source", point.what),
      whatText(model, "shapes", point.what),
    ].filter(Boolean);
  }

  function tip(number, event) {
    const box = circles[number].getBoundingClientRect();
    showTip(lines(points[number]), event ? event.clientX : box.right, event ? event.clientY : box.bottom);
  }

  function zoom(factor, event) {
    const box = svg.getBoundingClientRect();
    const x = event ? event.clientX - box.left : (axes.x.start + axes.x.end) / 2;
    const y = event ? event.clientY - box.top : (axes.y.start + axes.y.end) / 2;
    axes.x.zoom(factor, x);
    axes.y.zoom(factor, y);
    draw();
  }

  function reset() {
    axes.x.reset();
    axes.y.reset();
    draw();
  }

  function focus(number) {
    circles[current].setAttribute("tabindex", "-1");
    current = Math.max(0, Math.min(points.length - 1, number));
    circles[current].setAttribute("tabindex", "0");
    circles[current].focus();
  }

  const pointOf = (event) =>
    event.target.dataset && event.target.dataset.point !== undefined ? Number(event.target.dataset.point) : null;
  svg.addEventListener("pointermove", (event) => {
    const at = pointOf(event);
    if (at === null) hideTip();
    else tip(at, event);
  });
  svg.addEventListener("pointerleave", hideTip);
  svg.addEventListener("focusin", (event) => {
    const at = pointOf(event);
    if (at !== null && event.target.matches(":focus-visible")) tip(at);
  });
  svg.addEventListener("focusout", hideTip);
  svg.addEventListener("click", (event) => {
    const at = pointOf(event);
    if (at !== null) {
      hideTip();
      goTo(points[at].what);
    }
  });
  svg.addEventListener("keydown", (event) => {
    const at = pointOf(event);
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (step) focus(current + step);
    else if (event.key === "Home") focus(0);
    else if (event.key === "End") focus(points.length - 1);
    else if ((event.key === "Enter" || event.key === " ") && at !== null) {
      hideTip();
      goTo(points[at].what);
    } else if (event.key === "+" || event.key === "=") zoom(1.4);
    else if (event.key === "-") zoom(1 / 1.4);
    else if (event.key === "0") reset();
    else if (event.key === "Escape") hideTip();
    else return;
    event.preventDefault();
  });
  onWheelZoom(svg, zoom);
  onDrag(svg, (x, y) => {
    axes.x.move(x);
    axes.y.move(y);
    draw();
  });
  toolbar.append(
    button("+", () => zoom(1.4), { "aria-label": "Zoom in", title: "Zoom in" }),
    button("−", () => zoom(1 / 1.4), { "aria-label": "Zoom out", title: "Zoom out" }),
    button("Reset", reset),
  );
  onWidth(root, build);
}
