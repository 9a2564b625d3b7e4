// @ts-check
/** A tooltip for what has `data-tip`, shown for the pointer and for the keyboard; and buttons that copy. */

const tip = document.createElement("div");
tip.className = "tip";
tip.setAttribute("role", "tooltip");
tip.hidden = true;
document.body.append(tip);

/** @param {Element} target */
function show(target) {
  tip.textContent = target.getAttribute("data-tip");
  tip.hidden = false;
  const at = target.getBoundingClientRect();
  const left = Math.min(at.left, document.documentElement.clientWidth - tip.offsetWidth - 8);
  const above = at.top - tip.offsetHeight - 6;
  tip.style.left = `${Math.max(8, left) + scrollX}px`;
  tip.style.top = `${(above > 0 ? above : at.bottom + 6) + scrollY}px`;
}

const hide = () => {
  tip.hidden = true;
};

for (const kind of ["pointerover", "focusin"]) {
  document.addEventListener(kind, (event) => {
    const target = event.target instanceof Element ? event.target.closest("[data-tip]") : null;
    if (target) show(target);
    else hide();
  });
}
document.addEventListener("focusout", hide);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") hide();
});

/** Adds a button to each command that has none. */
function addCopyButtons() {
  for (const box of document.querySelectorAll("[data-copy]:not(:has(button))")) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "Copy";
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(box.querySelector("code")?.textContent ?? "");
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy"), 1500);
    });
    box.append(button);
  }
}

addCopyButtons();
document.addEventListener("optigpu:shown", addCopyButtons);
