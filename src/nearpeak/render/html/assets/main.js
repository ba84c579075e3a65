// Starts the page: reads the data, builds each part, and joins them.

function main() {
  const model = readModel(JSON.parse(byId("data").textContent));
  document.documentElement.classList.add("ready");
  const table = opTable(model, byId("op-table"));
  const filters = filterBar(model, table, byId("op-filters"));
  findings(byId("findings"), filters, table);
  glossary(document.body);
  copyButtons(byId("findings"));
  roofline(model, byId("roofline-plot"), byId("roofline-tools"), filters.goTo);
  icicle(model, byId("module-plot"), byId("module-tools"), (module) => {
    filters.set({ module });
    table.grid.focus({ preventScroll: true });
    byId("ops").scrollIntoView({ block: "start" });
  });
  let strip = null;
  if (model.timeline) {
    byId("timeline-part").hidden = false;
    strip = timeline(model, byId("timeline-plot"), byId("timeline-tools"), byId("timeline-gaps"), filters.goTo);
  }
  themeButton(() => {
    if (strip) strip.resample();
  });
}
