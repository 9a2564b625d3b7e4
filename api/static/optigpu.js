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
async function showPage(url) {
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
  void showPage(url);
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
  if (shown !== location.pathname + location.search) void showPage(new URL(location.href));
});

/** A tooltip for what has `data-tip`, shown for the pointer and for the keyboard; and buttons that copy. */

const tip = document.createElement("div");
tip.className = "tip";
tip.setAttribute("role", "tooltip");
tip.hidden = true;
document.body.append(tip);

/** @param {Element} target */
function showTip(target) {
  tip.textContent = target.getAttribute("data-tip");
  tip.hidden = false;
  const at = target.getBoundingClientRect();
  const left = Math.min(at.left, document.documentElement.clientWidth - tip.offsetWidth - 8);
  const above = at.top - tip.offsetHeight - 6;
  tip.style.left = `${Math.max(8, left) + scrollX}px`;
  tip.style.top = `${(above > 0 ? above : at.bottom + 6) + scrollY}px`;
}

const hideTip = () => {
  tip.hidden = true;
};

for (const kind of ["pointerover", "focusin"]) {
  document.addEventListener(kind, (event) => {
    const target = event.target instanceof Element ? event.target.closest("[data-tip]") : null;
    if (target) showTip(target);
    else hideTip();
  });
}
document.addEventListener("focusout", hideTip);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") hideTip();
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

/** Keys: `/` to the filters, `j` and `k` from row to row, `g` and a letter to a page. */

const PAGES = { l: "/", p: "/pareto", t: "/techniques", c: "/claims", h: "/hardware", w: "/workers", d: "/devices" };
let going = false;

/** @param {number} step */
function move(step) {
  const rows = [...document.querySelectorAll("main tbody tr a.row")];
  const at = rows.indexOf(/** @type {Element} */ (document.activeElement));
  const next = rows[Math.min(rows.length - 1, Math.max(0, at + step))];
  if (next instanceof HTMLElement) next.focus();
}

/** @param {string} path */
function go(path) {
  const link = document.querySelector(`header nav a[href$="${path}"]`);
  if (link instanceof HTMLAnchorElement) location.assign(link.href);
}

document.addEventListener("keydown", (event) => {
  const field = event.target instanceof Element && event.target.closest("input, select, textarea");
  if (field || event.ctrlKey || event.metaKey || event.altKey) return;
  if (going && event.key in PAGES) go(PAGES[/** @type {keyof typeof PAGES} */ (event.key)]);
  going = event.key === "g";
  if (event.key === "j") move(1);
  if (event.key === "k") move(-1);
  if (event.key === "/") {
    const first = document.querySelector("form[data-filters] :is(select, input:not([type=hidden]))");
    if (first instanceof HTMLElement) first.focus();
    event.preventDefault();
  }
});

/** Parts of a page that change: elements with `data-live` and an id, replaced by those of the page as it is now. */

/** @param {Element} old @param {Element} now */
function keepOpen(old, now) {
  const details = now.querySelectorAll("details");
  old.querySelectorAll("details").forEach((each, number) => {
    if (details[number]) details[number].open = each.open;
  });
}

/** @param {string} text the page as it is now */
function showChanges(text) {
  const page = new DOMParser().parseFromString(text, "text/html");
  const focused = document.activeElement?.id;
  for (const old of document.querySelectorAll("[data-live]")) {
    const now = page.getElementById(old.id);
    if (!now || now.innerHTML === old.getAttribute("data-shown")) continue;
    const shown = now.innerHTML;
    keepOpen(old, now);
    now.setAttribute("data-shown", shown);
    old.replaceWith(document.adoptNode(now));
  }
  document.title = page.title;
  if (focused && document.activeElement?.id !== focused) document.getElementById(focused)?.focus();
  document.dispatchEvent(new Event("optigpu:shown"));
}

/**
 * Fetches the page and shows what has changed in it. A page that cannot be fetched changes nothing.
 * @param {string} url
 * @param {RequestInit} [how]
 * @returns {Promise<boolean>} whether it was shown
 */
async function refresh(url, how) {
  try {
    const answer = await fetch(url, { headers: { Accept: "text/html" }, ...how });
    if (answer.status >= 500) return false;
    showChanges(await answer.text());
    return true;
  } catch {
    return false;
  }
}

/** The form of a job is checked while it is filled in: the service says what is wrong, at its field. */

const CHECK_PAUSE_MS = 400;
/** @type {ReturnType<typeof setTimeout> | undefined} */
let checking;
/** @type {AbortController | undefined} */
let asking;

/** @param {HTMLFormElement} form */
function mark(form) {
  for (const field of form.querySelectorAll("input, select, textarea")) {
    const error = document.getElementById(`error-${field.id}`);
    if (error?.textContent) field.setAttribute("aria-invalid", "true");
    else field.removeAttribute("aria-invalid");
  }
}

/** @param {HTMLFormElement} form */
async function check(form) {
  asking?.abort();
  asking = new AbortController();
  const fields = new URLSearchParams();
  for (const [name, value] of new FormData(form)) fields.append(name, String(value));
  fields.set("ask", "check");
  if (await refresh(form.action, { method: "POST", body: fields, signal: asking.signal })) mark(form);
}

document.addEventListener("input", (event) => {
  const form = event.target instanceof Element ? event.target.closest("form[data-checked]") : null;
  if (!(form instanceof HTMLFormElement)) return;
  clearTimeout(checking);
  checking = setTimeout(() => void check(form), CHECK_PAUSE_MS);
});

/** A job's page follows the job: with each of its events the page shows what has changed. */

const KINDS = [
  "state", "planned", "estimated", "refreshing", "variant_started", "rough", "progressed", "variant_finished", "finished",
  "cancel_requested",
];
const FINAL = ["succeeded", "failed", "cancelled"];
const EVENT_PAUSE_MS = 500;
const PROGRESS_PAUSE_MS = 3000;
const AGAIN_MS = 3000;
const followed = document.querySelector("[data-events]");

let after = Number(followed?.getAttribute("data-after"));
let refreshing = false;

/**
 * Seldom, since what measures may be on this machine, and always once more after the last event.
 * @param {number} pause_ms
 */
function soon(pause_ms) {
  if (refreshing) return;
  refreshing = true;
  setTimeout(async () => {
    refreshing = false;
    if (!(await refresh(location.href))) soon(AGAIN_MS);
  }, pause_ms);
}

/** @param {string} address */
function follow(address) {
  const source = new EventSource(`${address}?after=${after}`);
  for (const kind of KINDS) {
    source.addEventListener(kind, (event) => {
      after = Number(event.lastEventId) || after;
      if (kind === "state" && FINAL.includes(JSON.parse(event.data).data.state)) source.close();
      soon(kind === "progressed" ? PROGRESS_PAUSE_MS : EVENT_PAUSE_MS);
    });
  }
  // The browser itself comes back after a break; not after an answer that is no stream, as of a proxy without service.
  source.addEventListener("error", () => {
    if (source.readyState === EventSource.CLOSED) setTimeout(() => follow(address), AGAIN_MS);
  });
}

const address = followed?.getAttribute("data-events");
if (address) follow(address);
