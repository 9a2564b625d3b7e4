// @ts-check
/** Filters without a reload: a form's fields go into the address, and only <main> is replaced. */

/**
 * @param {HTMLFormElement} form
 * @returns {URL} the page with the form's fields that are not empty
 */
function wanted(form) {
  const url = new URL(form.action);
  for (const [name, value] of new FormData(form)) {
    if (typeof value === "string" && value.trim() !== "") url.searchParams.append(name, value.trim());
  }
  for (const several of form.querySelectorAll(".ticks")) {
    const boxes = [...several.querySelectorAll("input")];
    if (boxes.every((box) => box.checked)) boxes.forEach((box) => url.searchParams.delete(box.name));
  }
  return url;
}

/** @type {AbortController | null} */
let loading = null;
/** What <main> is of; a fragment is no other page. */
let shown = location.pathname + location.search;

/**
 * @param {URL} url
 * @returns {Promise<void>}
 */
async function show(url) {
  loading?.abort();
  loading = new AbortController();
  shown = url.pathname + url.search;
  const main = document.querySelector("main");
  if (!main) return location.assign(url);
  main.setAttribute("aria-busy", "true");
  try {
    const answer = await fetch(url, { headers: { Accept: "text/html" }, signal: loading.signal });
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const found = page.querySelector("main");
    if (!found) return location.assign(url);
    const focused = document.activeElement?.getAttribute("name");
    main.replaceWith(found);
    document.title = page.title;
    const bottom = page.querySelector("footer.bottom");
    if (bottom) document.querySelector("footer.bottom")?.replaceWith(bottom);
    const field = focused && found.querySelector(`[name="${CSS.escape(focused)}"]`);
    if (field instanceof HTMLElement) field.focus();
    document.dispatchEvent(new Event("optigpu:shown"));
  } catch (error) {
    if (!(error instanceof DOMException && error.name === "AbortError")) location.assign(url);
  }
}

/** @param {HTMLFormElement} form */
function apply(form) {
  const url = wanted(form);
  if (url.href === location.href) return;
  history.pushState(null, "", url);
  void show(url);
}

document.addEventListener("change", (event) => {
  const form = event.target instanceof Element ? event.target.closest("form[data-filters]") : null;
  if (form instanceof HTMLFormElement && form.checkValidity()) apply(form);
});
document.addEventListener("submit", (event) => {
  if (!(event.target instanceof HTMLFormElement) || !event.target.matches("form[data-filters]")) return;
  event.preventDefault();
  apply(event.target);
});
addEventListener("popstate", () => {
  if (shown !== location.pathname + location.search) void show(new URL(location.href));
});
