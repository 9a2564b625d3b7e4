// @ts-check
/** The form of a job is checked while it is filled in: the service says what is wrong, at its field. */

import { refresh } from "./live.js";

const PAUSE_MS = 400;
/** @type {ReturnType<typeof setTimeout> | undefined} */
let waiting;
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
  clearTimeout(waiting);
  waiting = setTimeout(() => void check(form), PAUSE_MS);
});
