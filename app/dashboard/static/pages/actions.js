/** The buttons for the actions that a job's state allows. */

import { post, remove } from "../api.js";
import { announce, h } from "../dom.js";

const POSSIBLE = {
  queued: ["pause", "cancel"],
  running: ["pause", "stop", "cancel"],
  paused: ["resume", "cancel"],
  failed: ["retry", "delete"],
  cancelled: ["retry", "delete"],
  succeeded: ["delete"],
};
const CONFIRMATIONS = {
  cancel: "Cancel this job? It saves no model; its last checkpoints stay, and a new job can start from them.",
  delete: "Delete this job with its model, its log and its checkpoints?",
};
const NAMES = {
  pause: "Pause",
  cancel: "Cancel",
  stop: "Stop, keep model",
  resume: "Resume",
  retry: "Train again",
  delete: "Delete",
};

/**
 * @param {() => Promise} refresh refreshes the page after an action
 */
export function actions(job, refresh) {
  const timedOut = job.status === "failed" && job.error?.code === "timeout";
  const errorElement = h("small", { class: "is-bad", role: "alert" });
  async function act(name, button) {
    if (CONFIRMATIONS[name] && !confirm(`${job.model_name}, …${job.id.slice(-6)}\n\n${CONFIRMATIONS[name]}`)) return;
    button.disabled = true;
    const path = `gradient-accumulation/training/${job.id}`;
    let requested = null;
    try {
      if (name === "delete") {
        await remove(path);
        if (location.hash.startsWith("#/job/")) location.hash = "#/jobs"; // the list keeps its filters
      } else {
        const answer = await post(`${path}/${name}`);
        requested = answer.requested;
        if (name === "retry") location.hash = `#/job/${answer.id}`;
      }
      announce(`${NAMES[name]}: ${requested ? "requested" : "done"}.`);
      await refresh();
    } catch (error) {
      errorElement.textContent = error.message;
    } finally {
      button.disabled = false;
    }
  }
  const possible = job.requested ? [] : [...(timedOut ? ["resume"] : []), ...POSSIBLE[job.status]];
  return h(
    "div",
    { class: "actions" },
    possible.map((name) =>
      h(
        "button",
        {
          type: "button",
          class: name === "cancel" || name === "delete" ? "quiet danger" : "quiet",
          "aria-label": `${NAMES[name]} job ${job.id.slice(-6)}`,
          onclick: (event) => act(name, event.target),
        },
        NAMES[name],
      ),
    ),
    errorElement,
  );
}
