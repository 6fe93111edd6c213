/** The queue: what waits and why, what runs, what came of the rest. */

import { get, poll, query } from "../api.js";
import { fill, h, table } from "../dom.js";
import { duration, fixed, moment, number } from "../format.js";
import { select } from "../terms.js";
import { actions } from "./actions.js";

export const TITLE = "Jobs";

const EVERY = 2000;
const REASONS = { no_worker: "no worker is running: start one with accrue worker", no_free_gpu: "every device is busy", not_before: "waits before it tries again", starting: "is about to start" };
const COLUMNS = [{ title: "" }, { title: "Job" }, { title: "Model" }, { title: "Status" }, { title: "Batch", number: true }, { title: "Steps", number: true }, { title: "Loss", number: true }, { title: "Begun" }, { title: "" }];

export function badge(job) {
  return h("span", { class: `badge ${job.status}` }, job.requested ? `${job.status}, to ${job.requested}` : job.status);
}

/** Why a job waits; empty where it does not. */
export function waits({ waiting }) {
  if (!waiting) return "";
  const when = waiting.predicted_start ? `, until ${moment(waiting.predicted_start)}` : "";
  return `Place ${number(waiting.queue_position)}: ${REASONS[waiting.reason] ?? waiting.reason}${when}.`;
}

export async function show(main, { chosen, signal }) {
  const status = select([["", "all"], "queued", "running", "paused", "succeeded", "failed", "cancelled"], chosen.get("status") ?? "");
  const label = h("input", { id: "label", type: "text", value: chosen.get("user_id") ?? "", autocomplete: "off" });
  status.id = "status";
  const list = h("div", {});
  const ticked = new Set();
  const compare = h("button", { type: "button", disabled: true, onclick: () => { location.hash = `#/compare?ids=${[...ticked].join(",")}`; } }, "Compare");
  const older = h("button", { type: "button", hidden: true }, "Older");
  const newest = h("button", { type: "button", hidden: true, onclick: () => go({ after: "" }) }, "Newest");

  function go(changes) {
    const next = { status: status.value, user_id: label.value.trim(), after: chosen.get("after") ?? "", ...changes };
    location.hash = `#/jobs${query(next)}`;
  }
  status.addEventListener("change", () => go({ after: "" }));
  label.addEventListener("change", () => go({ after: "" }));

  main.append(h("h1", {}, "Jobs"),
    h("section", { class: "panel", "aria-label": "Jobs" },
      h("form", { class: "fields", onsubmit: (event) => event.preventDefault() },
        h("div", { class: "field" }, h("label", { for: "status" }, "Status"), status),
        h("div", { class: "field" }, h("label", { for: "label" }, "Label (user_id)"), label)),
      list, h("p", { class: "actions" }, compare, newest, older)));

  function tick(event, id) {
    if (event.target.checked) ticked.add(id);
    else ticked.delete(id);
    compare.disabled = ticked.size < 2;
  }

  let shown = null;
  async function look() {
    const asked = { limit: 50, status: status.value, user_id: label.value.trim(), after: chosen.get("after") };
    const page = await get(`gradient-accumulation/training${query(asked)}`, signal);
    const now = JSON.stringify(page);
    if (now === shown) return true; // nothing is drawn anew beneath somebody's hands
    shown = now;
    newest.hidden = !asked.after;
    older.hidden = !page.has_more;
    older.onclick = () => go({ after: page.last_id });
    const focused = document.activeElement?.dataset?.at;
    fill(list, table("Newest first", COLUMNS, page.data.map((job) => [
      h("input", { type: "checkbox", "aria-label": `Compare ${job.id}`, checked: ticked.has(job.id), onchange: (event) => tick(event, job.id) }),
      h("a", { href: `#/job/${job.id}` }, `…${job.id.slice(-6)}`),
      job.model_name,
      [badge(job), job.waiting && h("div", { class: "muted" }, waits(job)), job.error && h("div", { class: "is-bad" }, job.error.message)],
      number(job.effective_batch_size),
      steps(job.progress),
      fixed(job.result?.final_loss ?? job.progress.loss_ema),
      began(job),
      actions(job, look),
    ]), "No job yet: plan one, and press start."));
    if (focused) list.querySelector(`[data-at="${CSS.escape(focused)}"]`)?.focus();
    return true;
  }
  await look();
  poll(look, EVERY, signal);
}

const steps = (progress) => (progress.steps_total ? `${number(progress.step)} / ${number(progress.steps_total)}` : number(progress.step));

function began(job) {
  if (!job.started_at) return "–";
  const took = job.finished_at ? `took ${duration(job.finished_at - job.started_at)}` : job.progress.eta_seconds !== null ? `${duration(job.progress.eta_seconds)} left` : "";
  return [moment(job.started_at), h("div", { class: "muted" }, took)];
}
