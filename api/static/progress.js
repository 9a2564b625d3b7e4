// @ts-check
/** A job's page follows the job: with each of its events the page shows what has changed. */

import { refresh } from "./live.js";

const KINDS = [
  "state", "planned", "estimated", "waiting", "variant_started", "rough", "progressed", "variant_finished", "finished",
  "cancel_requested",
];
const FINAL = ["succeeded", "failed", "cancelled"];
const PAUSE_MS = 500;
const PROGRESS_PAUSE_MS = 3000;
const AGAIN_MS = 3000;
const followed = document.querySelector("[data-events]");

let after = Number(followed?.getAttribute("data-after"));
let waiting = false;

/**
 * Seldom, since what measures may be on this machine, and always once more after the last event.
 * @param {number} pause_ms
 */
function soon(pause_ms) {
  if (waiting) return;
  waiting = true;
  setTimeout(async () => {
    waiting = false;
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
      soon(kind === "progressed" ? PROGRESS_PAUSE_MS : PAUSE_MS);
    });
  }
  // The browser itself comes back after a break; not after an answer that is no stream, as of a proxy without service.
  source.addEventListener("error", () => {
    if (source.readyState === EventSource.CLOSED) setTimeout(() => follow(address), AGAIN_MS);
  });
}

const address = followed?.getAttribute("data-events");
if (address) follow(address);
