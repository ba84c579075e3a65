// The op table: only the rows that can be seen are in the page, so that 100,000 of them scroll and sort at once.

const ROW = 24; // pixels, as in style.css
const OVERSCAN = 6;
const PRINTED_ROWS = 60;

function opTable(model, root) {
  const grid = make("div", {
    class: "grid",
    role: "grid",
    tabindex: "0",
    "aria-label": "Ops",
    "aria-describedby": "table-help",
  });
  const header = make("div", { class: "row header", role: "row", "aria-rowindex": "1" });
  const body = make("div", { class: "body", role: "presentation" });
  const detail = make("div", { class: "detail", role: "region", "aria-label": "Selected op", hidden: true });
  grid.append(header, body);
  root.append(grid, detail);

  const view = {
    mode: "groups",
    ops: null,
    figures: null,
    rows: new Uint32Array(0),
    sort: { id: "lost", descending: true },
    active: -1,
    unit: [1e-3, "ms", 2],
  };
  view.time = (value) => (value === value ? fixed(value / view.unit[0], view.unit[2]) : "-");
  const moduleTexts = new Map();
  view.moduleText = (row) => {
    if (view.mode === "ops") return model.modules[model.module[row]];
    if (!moduleTexts.has(row)) moduleTexts.set(row, commonModule(view.modules(row)));
    return moduleTexts.get(row);
  };
  view.modules = (row) => {
    const seen = new Set();
    const all = view.members();
    for (let i = all.starts[row]; i < all.starts[row + 1] && seen.size < 2000; i += 1)
      seen.add(model.module[all.ops[i]]);
    return [...seen].map((module) => model.modules[module]);
  };
  view.members = () => (view.membership = view.membership || membersOf(model, view.ops));
  const columns = columnsOf(model, view);
  grid.setAttribute("aria-colcount", columns.length);
  grid.style.setProperty("--columns", columns.map((column) => `${column.width}px`).join(" "));
  grid.style.setProperty("--width", `${columns.reduce((sum, column) => sum + column.width, 0)}px`);

  const heads = columns.map((column, number) => {
    const cell = make("div", {
      class: column.number ? "cell number" : "cell",
      role: "columnheader",
      "aria-colindex": number + 1,
      title: column.about,
    });
    if (column.key) cell.append(button(column.label, () => sortBy(column.id), { "data-column": column.id }));
    else cell.append(make("span", { class: "hidden-text", text: "measured, of which the bound" }));
    header.append(cell);
    return cell;
  });

  const pool = [];
  function prepare(number) {
    while (pool.length < number) {
      const texts = columns.map(() => document.createTextNode(""));
      const cells = columns.map((column, at) =>
        make(
          "div",
          { class: `cell${column.number ? " number" : ""} c-${column.id}`, role: "gridcell", "aria-colindex": at + 1 },
          texts[at],
        ),
      );
      const bar = makeSvg(
        "svg",
        { class: "strip", "aria-hidden": "true" },
        makeSvg("rect", { class: "lost", height: "100%" }),
        makeSvg("rect", { class: "bound", height: "100%" }),
      );
      cells[columns.findIndex((column) => column.id === "bar")].replaceChildren(bar);
      const element = make("div", { class: "row", role: "row", id: `row-${pool.length}` }, ...cells);
      body.append(element);
      pool.push({ element, texts, bar, row: -1, place: -1 });
    }
  }

  function fill(slot, place) {
    const row = view.rows[place];
    slot.element.classList.toggle("active", place === view.active);
    slot.element.setAttribute("aria-selected", place === view.active);
    if (slot.row === row && slot.version === view.version && slot.place === place) return;
    slot.element.style.transform = `translateY(${place * ROW}px)`;
    slot.element.classList.toggle("odd", place % 2 === 1);
    slot.element.setAttribute("aria-rowindex", place + 2);
    Object.assign(slot, { row, place, version: view.version });
    columns.forEach((column, at) => {
      if (column.id === "bar") return;
      const text = column.text(row);
      if (slot.texts[at].data !== text) slot.texts[at].data = text;
    });
    const measured = view.figures.measured(row) / view.longest;
    const bound = Math.min(measured, (view.figures.bound(row) || 0) / view.longest);
    slot.bar.children[0].setAttribute("width", `${(100 * measured).toFixed(2)}%`);
    slot.bar.children[1].setAttribute("width", `${(100 * bound).toFixed(2)}%`);
  }

  function draw() {
    const inner = grid.clientHeight - ROW;
    const first = Math.max(0, Math.floor(grid.scrollTop / ROW) - OVERSCAN);
    const last = Math.min(view.rows.length, Math.ceil((grid.scrollTop + inner) / ROW) + OVERSCAN);
    const slots = Math.ceil(inner / ROW) + 2 * OVERSCAN + 2;
    prepare(slots);
    for (let place = first; place < last; place += 1) fill(pool[place % slots], place); // a row stays in its slot
    pool.forEach((slot, number) => {
      const used = number < slots && slot.place >= first && slot.place < last;
      slot.element.hidden = !used;
      if (!used) slot.place = -1;
    });
    const active = view.active >= first && view.active < last ? pool[view.active % slots] : null;
    if (active) grid.setAttribute("aria-activedescendant", active.element.id);
    else grid.removeAttribute("aria-activedescendant");
  }

  function sort() {
    const column = columns.find((each) => each.id === view.sort.id);
    const key = column.key();
    const keys = new Float64Array(view.rows.length);
    for (let i = 0; i < keys.length; i += 1) keys[i] = key(view.rows[i]);
    view.rows = orderOf(keys, view.sort.descending).map((at) => view.rows[at]);
  }

  function refresh() {
    view.version = (view.version || 0) + 1;
    heads.forEach((cell, at) => {
      const column = columns[at];
      if (column.id === view.sort.id) cell.setAttribute("aria-sort", view.sort.descending ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
      if (column.timed) cell.firstChild.textContent = `${column.label}, ${view.unit[1]}`;
    });
    grid.setAttribute("aria-rowcount", view.rows.length + 1);
    body.style.height = `${view.rows.length * ROW}px`;
    grid.style.height = `${Math.min(Math.max(8, view.rows.length + 2), 26) * ROW}px`;
    draw();
  }

  function sortBy(id) {
    const column = columns.find((each) => each.id === id);
    const same = view.sort.id === id;
    view.sort = { id, descending: same ? !view.sort.descending : !column.sortText };
    const row = view.rows[view.active];
    sort();
    view.active = row === undefined ? -1 : view.rows.indexOf(row);
    grid.scrollTop = 0;
    refresh();
    say(`Sorted by ${column.label || column.id}, ${view.sort.descending ? "largest" : "smallest"} first.`);
  }

  // Shows these ops (Uint32Array; null for all), as groups or one by one.
  function show(ops, mode) {
    view.ops = ops;
    view.mode = mode;
    view.membership = null;
    moduleTexts.clear();
    const groups = mode === "groups" ? groupsOf(model, ops) : null;
    view.figures = figuresOf(model, mode, groups);
    view.rows = groups ? Uint32Array.from(groups.what) : ops || Uint32Array.from(model.kind.keys());
    view.active = -1;
    view.longest = view.rows.reduce((most, row) => Math.max(most, view.figures.measured(row)), 0) || 1;
    view.unit = unitOf(view.longest);
    sort();
    grid.scrollTop = 0;
    detail.hidden = true;
    refresh();
    return view.rows.length;
  }

  function activate(place, { scroll = true, open = false } = {}) {
    if (!view.rows.length) return;
    view.active = Math.max(0, Math.min(view.rows.length - 1, place));
    if (scroll) {
      const top = view.active * ROW;
      const room = grid.clientHeight - 2 * ROW;
      if (top < grid.scrollTop) grid.scrollTop = top;
      else if (top > grid.scrollTop + room) grid.scrollTop = top - room;
    }
    draw();
    if (open || !detail.hidden) openDetail(view.rows[view.active]);
  }

  function openDetail(row) {
    clear(detail);
    const close = button(
      "Close",
      () => {
        detail.hidden = true;
        grid.focus();
      },
      { class: "close" },
    );
    detail.append(close, make("h3", { text: whatText(model, "name", view.figures.what(row)) }));
    const facts = make("dl");
    for (const column of columns) {
      if (!column.text || column.id === "op") continue;
      const text = column.timed ? seconds(view.figures[column.id](row)) : (column.full || column.text)(row);
      facts.append(make("dt", { text: column.label }), make("dd", { text }));
    }
    detail.append(facts);
    const source = whatText(model, "source", view.figures.what(row));
    const excerpt = model.excerpts.get(source);
    if (excerpt) detail.append(excerptOf(excerpt, source));
    if (view.mode === "groups" && view.figures.ops(row) > 1) {
      detail.append(button(`Show its ${count(view.figures.ops(row))} ops one by one`, () => api.onSingle(row)));
    }
    detail.hidden = false;
  }

  // Goes to the row of a `what`, or of an op where ops are shown one by one. False where it is filtered out.
  function goTo(what, op) {
    const wanted = view.mode === "groups" ? what : op;
    let place = wanted === undefined ? -1 : view.rows.indexOf(wanted);
    if (place < 0 && view.mode === "ops") place = view.rows.findIndex((row) => model.whatOf[row] === what);
    if (place < 0) return false;
    activate(place, { open: true });
    grid.scrollTop = Math.max(0, place * ROW - grid.clientHeight / 3);
    grid.focus({ preventScroll: true });
    root.scrollIntoView({ block: "start" });
    say(`Row ${place + 1}: ${whatText(model, "short", what)}`);
    return true;
  }

  grid.addEventListener("scroll", draw, { passive: true });
  new ResizeObserver(draw).observe(grid);
  grid.addEventListener("keydown", (event) => {
    if (event.target !== grid) return;
    const page = Math.max(1, Math.floor(grid.clientHeight / ROW) - 2);
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    if (event.key in moves) {
      const move = moves[event.key];
      activate(Number.isFinite(move) ? view.active + move : move > 0 ? view.rows.length - 1 : 0);
    } else if (event.key === "ArrowRight" || event.key === "ArrowLeft") {
      grid.scrollLeft += event.key === "ArrowRight" ? 80 : -80;
    } else if (event.key === "Enter" && view.active >= 0) {
      openDetail(view.rows[view.active]);
    } else if (event.key === "Escape") {
      detail.hidden = true;
    } else return;
    event.preventDefault();
  });
  body.addEventListener("click", (event) => {
    const slot = pool.find((each) => each.element.contains(event.target));
    if (slot) activate(slot.place, { scroll: false, open: true });
  });
  body.addEventListener("pointerover", (event) => {
    // what is cut off is said by the cell under the pointer
    const slot = pool.find((each) => each.element.contains(event.target));
    const at = slot ? [...slot.element.children].indexOf(event.target) : -1;
    if (at >= 0 && !columns[at].number && columns[at].text)
      event.target.title = (columns[at].full || columns[at].text)(slot.row);
  });
  window.addEventListener("beforeprint", () => {
    grid.style.height = `${(Math.min(PRINTED_ROWS, view.rows.length) + 1) * ROW}px`;
    grid.scrollTop = 0;
    draw();
  });
  window.addEventListener("afterprint", refresh);

  const api = { show, goTo, sortBy, view, grid, onSingle: () => {} };
  return api;
}
