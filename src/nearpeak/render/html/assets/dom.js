// Elements, and the one tip that follows pointer and focus. Text only ever becomes textContent.

const SVG = "http://www.w3.org/2000/svg";

function make(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

function makeSvg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") element.textContent = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

function byId(id) {
  return document.getElementById(id);
}

function clear(element) {
  element.replaceChildren();
}

function button(label, action, attributes = {}) {
  const made = make("button", { type: "button", text: label, ...attributes });
  made.addEventListener("click", action);
  return made;
}

// What a screen reader says without the focus moving.
function say(text) {
  byId("live").textContent = text;
}

// Shows lines beside a place of the window; the first one is its head.
function showTip(lines, x, y) {
  const tip = byId("tip");
  clear(tip);
  lines.filter(Boolean).forEach((line, number) => tip.append(make(number ? "div" : "b", { text: line })));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = x + 14 + box.width > window.innerWidth ? x - 14 - box.width : x + 14;
  const top = y + 14 + box.height > window.innerHeight ? y - 14 - box.height : y + 14;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, top)}px`;
}

function hideTip() {
  byId("tip").hidden = true;
}

// Zooms with the wheel only where the picture has the focus or Ctrl is held: a page has to scroll over it.
function onWheelZoom(element, zoom) {
  const listener = (event) => {
    if (!event.ctrlKey && !element.contains(document.activeElement)) return;
    event.preventDefault();
    zoom(Math.exp(-event.deltaY * 0.002), event);
  };
  element.addEventListener("wheel", listener, { passive: false });
}

// Calls `moved` with the distance since the last call while a pointer is dragged; a click stays a click.
function onDrag(element, moved) {
  let last = null;
  let dragging = false;
  element.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    last = [event.clientX, event.clientY];
    dragging = false;
  });
  element.addEventListener("pointermove", (event) => {
    if (!last) return;
    const [x, y] = [event.clientX - last[0], event.clientY - last[1]];
    if (!dragging && Math.hypot(x, y) < 4) return;
    if (!dragging) element.setPointerCapture(event.pointerId);
    dragging = true;
    last = [event.clientX, event.clientY];
    moved(x, y);
  });
  const end = () => {
    last = null;
  };
  element.addEventListener("pointerup", end);
  element.addEventListener("pointercancel", end);
  element.addEventListener(
    "click",
    (event) => {
      if (dragging) event.stopPropagation();
      dragging = false;
    },
    true,
  );
}

// Calls `draw` when the width of an element changes, once per frame.
function onWidth(element, draw) {
  let width = 0;
  new ResizeObserver(() => {
    const found = Math.floor(element.clientWidth);
    if (!found || found === width) return;
    width = found;
    requestAnimationFrame(() => draw(width));
  }).observe(element);
}

// Lines of code with their numbers, the one that is named marked.
function excerptOf(excerpt, source) {
  const lines = excerpt.lines.map((text, at) => {
    const number = String(excerpt.first + at);
    const marked = source.endsWith(`:${number}`);
    return make(marked ? "mark" : "span", {}, make("i", { text: number }), text || " ");
  });
  return make("pre", { class: "excerpt scroll", tabindex: "0" }, make("code", {}, ...lines));
}

// Beyond its room a text ends with dots; digits and letters are about 0.56 of the font's size wide.
function fitted(text, width, size = 12) {
  const most = Math.floor(width / (0.56 * size));
  if (text.length <= most) return text;
  return most < 3 ? "" : `${text.slice(0, most - 1)}…`;
}
