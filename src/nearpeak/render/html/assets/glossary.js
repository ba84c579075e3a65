// Words with an explanation: it is shown under the pointer, for the keyboard, and after a touch.

function glossary(root) {
  for (const word of root.querySelectorAll(".term")) {
    word.dataset.about = word.title; // the browser's own tip would come late, and not for the keyboard
    word.setAttribute("aria-description", word.title);
    word.removeAttribute("title");
  }
  const show = (event) => {
    const word = event.target.closest(".term");
    if (!word) return;
    const box = word.getBoundingClientRect();
    showTip([word.textContent, word.dataset.about], box.left, box.bottom - 8);
  };
  const hide = (event) => {
    if (event.target.closest(".term")) hideTip();
  };
  root.addEventListener("pointerover", show);
  root.addEventListener("focusin", show);
  root.addEventListener("pointerout", hide);
  root.addEventListener("focusout", hide);
  root.addEventListener("keydown", (event) => {
    if (event.key === "Escape") hide(event);
  });
}
