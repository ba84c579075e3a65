// The modules as an icicle: width by measured time, color by how much of it the bound is. A click goes into one.

const LEVEL = 24;
const MOST_LEVELS = 12;
const NARROWEST = 1.5;
const STEPS = [0.8, 0.6, 0.4, 0.2];

function headroomClass(node) {
  const share = node.measured > 0 ? node.bound / node.measured : 1;
  const step = STEPS.findIndex((least) => share >= least);
  return `h-${step < 0 ? STEPS.length : step}`;
}

// The rectangles of what is inside a node, the widest depth first; too narrow ones are left out.
function icicleBoxes(node, width) {
  const boxes = [];
  const open = [[node, 0, width, 0]];
  while (open.length) {
    const [at, x, room, level] = open.pop();
    boxes.push({ node: at, x, width: room, level });
    if (level + 1 >= MOST_LEVELS) continue;
    let left = x;
    for (const child of at.children) {
      const share = (child.measured / at.measured) * room;
      if (share >= NARROWEST) open.push([child, left, share, level + 1]);
      left += share;
    }
  }
  return boxes.sort((a, b) => a.level - b.level || a.x - b.x);
}

function icicle(model, root, toolbar, showModule) {
  const tree = modulesOf(model);
  if (!tree.children.some((child) => child.path !== null)) {
    root.append(make("p", { class: "note", text: "It is not known in which modules the ops ran." }));
    return;
  }
  let top = tree.children.length === 1 ? tree.children[0] : tree;
  let boxes = [];
  let groups = [];
  let current = 0;
  const path = make("div", { class: "path" });
  const svg = makeSvg("svg", {
    class: "icicle",
    role: "group",
    "aria-label": "Modules by measured time. Arrow keys go from one to another, Enter goes into it, Escape out of it.",
  });
  root.append(path, svg);

  function lines(node) {
    return [
      node.path || node.name,
      `${seconds(node.measured)} in ${counted(node.ops, "op")}, ${percent(node.measured / model.wall)} of the step`,
      `bound ${seconds(node.bound)}, ${percent(node.measured > 0 ? node.bound / node.measured : 0, 0)} of it`,
    ];
  }

  function draw(width) {
    boxes = icicleBoxes(top, width);
    const levels = boxes[boxes.length - 1].level + 1;
    svg.setAttribute("viewBox", `0 0 ${width} ${levels * LEVEL}`);
    svg.setAttribute("height", levels * LEVEL);
    groups = boxes.map((box, number) => {
      const height = LEVEL - 1;
      const rectangle = makeSvg("rect", {
        width: Math.max(0.5, box.width - 1).toFixed(2),
        height,
        class: headroomClass(box.node),
      });
      const label = makeSvg("text", { x: 4, y: 16, text: box.width > 22 ? fitted(box.node.name, box.width - 8) : "" });
      return makeSvg(
        "g",
        {
          transform: `translate(${box.x.toFixed(2)} ${box.level * LEVEL})`,
          "data-box": number,
          tabindex: number === 0 ? "0" : "-1",
          role: "button",
          "aria-label": lines(box.node).join(", "),
        },
        rectangle,
        label,
      );
    });
    current = 0;
    svg.replaceChildren(...groups);
    drawPath();
  }

  function drawPath() {
    clear(path);
    const trail = [];
    for (let node = top; node; node = node.parent) trail.unshift(node);
    trail.forEach((node, at) => {
      if (at) path.append(make("span", { "aria-hidden": "true", text: "›" }));
      path.append(
        at < trail.length - 1 ? button(node.name || "(no name)", () => enter(node)) : make("b", { text: node.name }),
      );
    });
    if (top.path !== null)
      path.append(button("Show its ops in the table", () => showModule(top.path), { class: "show-ops" }));
  }

  function enter(node, focusFirst = false) {
    if (!node || !(node.measured > 0)) return;
    top = node;
    draw(Math.floor(root.clientWidth));
    hideTip();
    if (focusFirst) groups[0].focus();
  }

  function focus(number) {
    if (number < 0 || number >= groups.length) return;
    groups[current].setAttribute("tabindex", "-1");
    current = number;
    groups[current].setAttribute("tabindex", "0");
    groups[current].focus();
  }

  const boxOf = (event) => {
    const group = event.target.closest ? event.target.closest("[data-box]") : null;
    return group ? Number(group.dataset.box) : null;
  };
  const find = (node) => boxes.findIndex((box) => box.node === node);
  svg.addEventListener("pointermove", (event) => {
    const at = boxOf(event);
    if (at === null) hideTip();
    else showTip(lines(boxes[at].node), event.clientX, event.clientY);
  });
  svg.addEventListener("pointerleave", hideTip);
  svg.addEventListener("focusout", hideTip);
  svg.addEventListener("focusin", (event) => {
    const at = boxOf(event);
    if (at === null || !event.target.matches(":focus-visible")) return;
    const area = groups[at].getBoundingClientRect();
    showTip(lines(boxes[at].node), area.left, area.bottom);
  });
  svg.addEventListener("click", (event) => {
    const at = boxOf(event);
    if (at !== null) enter(at === 0 && top.parent ? top.parent : boxes[at].node);
  });
  svg.addEventListener("keydown", (event) => {
    const node = boxes[current].node;
    if (event.key === "ArrowRight" || event.key === "ArrowLeft") {
      const next = current + (event.key === "ArrowRight" ? 1 : -1);
      if (boxes[next] && boxes[next].level === boxes[current].level) focus(next);
    } else if (event.key === "ArrowDown") focus(boxes.findIndex((box) => box.node.parent === node));
    else if (event.key === "ArrowUp") focus(find(node.parent));
    else if (event.key === "Enter" || event.key === " ") enter(node, true);
    else if (event.key === "Escape" || event.key === "Backspace") enter(top.parent, true);
    else return;
    event.preventDefault();
  });
  const names = ["80 % and more", "60 %", "40 %", "20 %", "less"];
  toolbar.append(
    make(
      "span",
      { class: "legend" },
      make("span", { text: "bound of measured:" }),
      ...names.map((name, step) => make("span", { class: `key h-${step}`, text: name })),
    ),
  );
  onWidth(root, draw);
}
