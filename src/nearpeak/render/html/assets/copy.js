// A button beside each piece of code that copies it.

const COPIED_FOR = 1500; // milliseconds

function copyButtons(root) {
  for (const code of root.querySelectorAll(".code")) {
    const text = code.querySelector("code");
    const copy = button(
      "Copy",
      async () => {
        const done = await copied(text);
        copy.textContent = done ? "Copied" : "Not copied";
        say(done ? "Copied" : "The browser does not allow copying.");
        setTimeout(() => (copy.textContent = "Copy"), COPIED_FOR);
      },
      { class: "copy", "aria-label": "Copy this code" },
    );
    code.append(copy);
  }
}

async function copied(element) {
  try {
    await navigator.clipboard.writeText(element.textContent);
    return true;
  } catch {
    // a page from a file may not have a clipboard: what is selected can be copied
    const selection = window.getSelection();
    selection.selectAllChildren(element);
    const done = document.execCommand("copy");
    selection.removeAllRanges();
    return done;
  }
}
