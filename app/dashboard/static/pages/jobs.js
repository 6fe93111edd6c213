/** The list of jobs: waiting ones with the reason, running ones, and the results of the others. */

import { get, poll, query } from "../api.js";
import { h, liveTable } from "../dom.js";
import { dateTime, duration, fixed, number } from "../format.js";
import { select } from "../terms.js";
import { actions } from "./actions.js";

export const TITLE = "Jobs";

const EVERY = 2000;
const REASONS = {
  no_worker: "no worker is running: start one with accrue worker",
  no_matching_worker: "no worker has the required labels: the page GPUs shows those of each worker",
  no_free_gpu: "waiting for free devices",
  retry_delay: "waiting to retry after a failure",
  quota_used_up: "its key has used up its device hours of this month: it waits for the next, or for an admin to raise the quota",
  starting: "waiting for a worker to claim it",
};
const COLUMNS = [
  { title: "" },
  { title: "Job" },
  { title: "Model" },
  { title: "Status" },
  { title: "Batch", number: true },
  { title: "Steps", number: true },
  { title: "Loss", number: true },
  { title: "Started" },
  { title: "" },
];

export function badge(job) {
  return h("span", { class: `badge ${job.status}` }, job.requested ? `${job.status}, ${job.requested} requested` : job.status);
}

/** Why a job waits; an empty string if it does not wait. */
export function waitingReason({ waiting }) {
  if (!waiting) return "";
  const when = waiting.predicted_start ? `; starts at ${dateTime(waiting.predicted_start)} at the earliest` : "";
  return `Position ${number(waiting.queue_position)} in the queue: ${REASONS[waiting.reason] ?? waiting.reason}${when}.`;
}

export async function show(main, { chosen, signal }) {
  const status = select(
    [["", "all"], "queued", "running", "paused", "succeeded", "failed", "cancelled"],
    chosen.get("status") ?? "",
  );
  const label = h("input", { id: "label", type: "text", value: chosen.get("user_id") ?? "", autocomplete: "off" });
  status.id = "status";
  const list = liveTable(
    "Newest first",
    COLUMNS,
    chosen.get("status") || chosen.get("user_id")
      ? "No jobs match."
      : "No jobs yet. Plan a job, and press Start. If you use a key, only the jobs created with it are listed.",
  );
  const ticked = new Set((chosen.get("ticked") ?? "").split(",").filter(Boolean));
  const compare = h("button", { type: "button", disabled: ticked.size < 2, onclick: compareTicked }, "Compare");
  const older = h("button", { type: "button", hidden: true }, "Older");
  const newest = h("button", { type: "button", hidden: true, onclick: () => go({ after: "" }) }, "Newest");

  /** Keeps the ticked jobs in the URL, so that they are still ticked when the user comes back. */
  function compareTicked() {
    const ids = [...ticked].join(",");
    history.replaceState(null, "", `#/jobs${query({ ...Object.fromEntries(chosen), ticked: ids })}`);
    location.hash = `#/compare?ids=${ids}`;
  }

  function go(changes) {
    const next = { status: status.value, user_id: label.value.trim(), after: chosen.get("after") ?? "", ...changes };
    location.hash = `#/jobs${query(next)}`;
  }
  status.addEventListener("change", () => go({ after: "" }));
  label.addEventListener("change", () => go({ after: "" }));

  main.append(
    h("h1", {}, "Jobs"),
    h(
      "section",
      { class: "panel", "aria-label": "Jobs" },
      h(
        "form",
        { class: "fields", onsubmit: (event) => event.preventDefault() },
        h("div", { class: "field" }, h("label", { for: "status" }, "Status"), status),
        h("div", { class: "field" }, h("label", { for: "label" }, "User (user_id)"), label),
      ),
      list.element,
      h("p", { class: "actions" }, compare, newest, older),
    ),
  );

  function tick(event, id) {
    if (event.target.checked) ticked.add(id);
    else ticked.delete(id);
    compare.disabled = ticked.size < 2;
  }

  async function look() {
    const filters = { limit: 50, status: status.value, user_id: label.value.trim(), after: chosen.get("after") };
    const page = await get(`gradient-accumulation/training${query(filters)}`, signal);
    newest.hidden = !filters.after;
    older.hidden = !page.has_more;
    older.onclick = () => go({ after: page.last_id });
    list.show(page.data.map((job) => [job.id, cellsOf(job)]));
    return true;
  }

  /** For each cell, a string that it depends on and a function that creates it. */
  function cellsOf(job) {
    const state = `${job.status} ${job.requested} ${waitingReason(job)} ${job.error?.message}`;
    const plain = (text) => [text, () => text];
    return [
      [
        `${job.progress.step > 1}`,
        () =>
          job.progress.step > 1 &&
          h("input", {
            type: "checkbox",
            "aria-label": `Compare ${job.id}`,
            checked: ticked.has(job.id),
            onchange: (event) => tick(event, job.id),
          }),
      ],
      ["", () => h("a", { href: `#/job/${job.id}` }, `…${job.id.slice(-6)}`)],
      [
        `${job.model_name} ${kind(job)}`,
        () => [job.model_name, kind(job) && h("div", { class: "muted" }, kind(job)), sweepLink(job)],
      ],
      [
        state,
        () => [
          badge(job),
          job.waiting && h("div", { class: "muted" }, waitingReason(job)),
          job.error && h("div", { class: "is-bad" }, job.error.message),
        ],
      ],
      plain(number(job.effective_batch_size)),
      plain(steps(job)),
      plain(fixed(job.result?.final_loss ?? job.progress.loss_ema)),
      [
        `${job.started_at} ${took(job)}`,
        () => (job.started_at ? [dateTime(job.started_at), h("div", { class: "muted" }, took(job))] : "–"),
      ],
      [`${job.status} ${job.requested}`, () => actions(job, look)],
    ];
  }
  await look();
  await poll(look, EVERY, signal);
}

/** A link to the sweep that a job belongs to. */
const sweepLink = ({ metadata: { sweep, sweep_values: values } }) =>
  sweep && values && h("div", {}, h("a", { href: `#/sweep/${encodeURIComponent(sweep)}` }, `sweep ${sweep}`));

/** The name of a job's training method, also if the method was given with options. */
export function method({ training_config: { method = "full" } }) {
  return typeof method === "string" ? method : Object.keys(method)[0];
}

/** Whether a job's model scores whole texts, so that it predicts no tokens. */
export const scoresSequences = (job) => ["classification", "reward"].includes(job.training_config.objective);

/** A job's objective and method, as far as they are not the usual ones. */
export function kind(job) {
  const { objective } = job.training_config;
  return [objective && objective !== "sft" && objective, method(job) !== "full" && method(job)].filter(Boolean).join(", ");
}

/** The steps of a job. A tuning job ends before its last step, so no step count is shown. */
const steps = ({ progress, tune }) =>
  tune === "only"
    ? "tuning only"
    : progress.steps_total
      ? `${number(progress.step)} / ${number(progress.steps_total)}`
      : number(progress.step);

function took(job) {
  if (job.finished_at) return `took ${duration(job.finished_at - job.started_at)}`;
  return job.progress.eta_seconds ? `${duration(job.progress.eta_seconds)} left` : "";
}
