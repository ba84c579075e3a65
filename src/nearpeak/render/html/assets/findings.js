// Findings are part of the page already; here their buttons show their ops in the table.

function findings(root, filters, table) {
  root.addEventListener("click", (event) => {
    const found = event.target.closest("[data-finding]");
    if (!found) return;
    filters.set({ finding: Number(found.dataset.finding) });
    table.grid.focus({ preventScroll: true });
    byId("ops").scrollIntoView({ block: "start" });
  });
  const closed = []; // of the whole page: nothing is folded on paper
  window.addEventListener("beforeprint", () => {
    for (const each of document.querySelectorAll("details:not([open])")) {
      closed.push(each);
      each.open = true;
    }
  });
  window.addEventListener("afterprint", () => {
    while (closed.length) closed.pop().open = false;
  });
}
