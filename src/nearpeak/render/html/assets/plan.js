// Starts a page of the planner: builds its sliders, and looks up what the planner computed when they move.

const KINDS = {
  training: [trainingControls, trainingAnswer],
  decode: [decodeControls, decodeAnswer],
};

// A slider over a list of values.
function picker(name, label, values, start) {
  const shown = make("b", { text: count(start) });
  const input = make("input", {
    type: "range", id: `slider-${name}`, min: 0, max: values.length - 1, step: 1,
    value: values.indexOf(start), disabled: values.length < 2, "aria-valuetext": String(start),
  });
  const control = make("div", { class: "control" }, make("label", { for: `slider-${name}` }, make("span", { text: label }), shown), input);
  return {
    name,
    control,
    input,
    read() {
      const value = values[Number(input.value)];
      shown.textContent = count(value);
      input.setAttribute("aria-valuetext", String(value));
      return value;
    },
  };
}

// A choice of a few names.
function chooser(name, label, names, start) {
  const input = make("select", { id: `slider-${name}` }, ...names.map((one) => make("option", { value: one, text: one, selected: one === start })));
  const control = make("div", { class: "control" }, make("label", { for: `slider-${name}` }, make("span", { text: label })), input);
  return { name, control, input, read: () => input.value };
}

// One bar of pieces, to the limit or to the longest where there is one.
function stackBar(pieces, limit, longest = null, color = 0) {
  const whole = pieces.reduce((sum, [, value]) => sum + value, 0);
  const end = longest ?? Math.max(whole, limit ?? 0) * 1.03;
  const bar = makeSvg("svg", { class: "stack-bar", viewBox: "0 0 1000 26", preserveAspectRatio: "none", role: "img", "aria-hidden": "true" });
  let begun = 0;
  pieces.forEach(([, value], number) => {
    const width = end > 0 ? (1000 * value) / end : 0;
    bar.append(makeSvg("rect", { class: `c-${number + color}`, x: begun, y: 0, width, height: 26 }));
    begun += width;
  });
  if (limit) {
    const place = (1000 * limit) / end;
    bar.append(makeSvg("line", { class: "limit", x1: place, x2: place, y1: 0, y2: 26 }));
  }
  return bar;
}

function main() {
  document.documentElement.classList.add("ready");
  themeButton(() => {});
  const sliders = JSON.parse(byId("data").textContent);
  if (!sliders) return;
  const [controlsOf, answerOf] = KINDS[sliders.kind];
  const controls = controlsOf(sliders.data);
  byId("controls").append(...controls.map((one) => one.control));
  const update = () => {
    const choice = Object.fromEntries(controls.map((one) => [one.name, one.read()]));
    byId("answer").replaceChildren(...answerOf(sliders.data, choice));
  };
  controls.forEach((one) => one.input.addEventListener("input", update));
  update();
}
