// @ts-check
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
