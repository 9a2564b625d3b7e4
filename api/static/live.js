// @ts-check
/** Parts of a page that change: elements with `data-live` and an id, replaced by those of the page as it is now. */

/** @param {Element} old @param {Element} now */
function keepOpen(old, now) {
  const details = now.querySelectorAll("details");
  old.querySelectorAll("details").forEach((each, number) => {
    if (details[number]) details[number].open = each.open;
  });
}

/** @param {string} text the page as it is now */
function show(text) {
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
export async function refresh(url, how) {
  try {
    const answer = await fetch(url, { headers: { Accept: "text/html" }, ...how });
    if (answer.status >= 500) return false;
    show(await answer.text());
    return true;
  } catch {
    return false;
  }
}
