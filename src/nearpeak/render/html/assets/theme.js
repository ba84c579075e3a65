// The button that turns the page light or dark.

const THEMES = ["auto", "light", "dark"];

function themeButton(changed) {
  const control = byId("theme");
  control.hidden = false;
  const set = (theme) => {
    document.documentElement.dataset.theme = theme;
    control.textContent = `Theme: ${theme}`;
    changed();
  };
  control.addEventListener("click", () =>
    set(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length]),
  );
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
  set("auto");
}
