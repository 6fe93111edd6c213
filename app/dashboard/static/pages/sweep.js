/** A sweep: its jobs side by side, the best of them, and their losses at the same number of samples seen. */

import { get, poll, ServiceError } from "../api.js";
import { chart, PALETTE, preload } from "../charts.js";
import { h, liveTable } from "../dom.js";
import { fixed, number } from "../format.js";
import { help } from "../terms.js";

export const TITLE = "Sweep";

const EVERY = 2000;
const MAX_CURVES = 10;
const ENDED = ["succeeded", "failed", "cancelled"];

export async function show(main, { id, signal }) {
  preload();
  const path = `gradient-accumulation/sweeps/${encodeURIComponent(id ?? "")}`;
  const first = await get(path, signal);
  const columns = [
    { title: "Job" },
    ...first.vary.map((name) => ({ title: name.replaceAll("_", " ") })),
    { title: "Status" },
    { title: "Steps", number: true },
    { title: "Loss", number: true },
    { title: "Validation loss", number: true },
    { title: "" },
  ];
  const list = liveTable("In the order of their creation", columns, "");
  const verdict = h("p", { class: "verdict", role: "status" });
  const curve = chart("Loss", { x: "samples seen", y: "loss, mean over equally many samples" }, help("loss"));
  const left = h("p", { class: "muted" });
  const figure = h("section", { class: "panel", "aria-label": "Losses", hidden: true }, curve.element, left);
  main.append(
    h("h1", {}, `Sweep ${first.name}`),
    h("section", { class: "panel", "aria-label": "Jobs" }, verdict, list.element),
    figure,
  );

  /** The colour of a job's curve, by the job's id. */
  const colours = new Map();

  function render(sweep) {
    verdict.textContent = summary(sweep);
    list.show(sweep.jobs.map((job) => [job.training_id, cells(job, sweep, colours.get(job.training_id))]));
  }

  let drawn = "";
  async function drawLosses(sweep) {
    const all = sweep.jobs.filter((job) => job.step > 1);
    const trained = [...all].sort((one, other) => rank(one, sweep) - rank(other, sweep)).slice(0, MAX_CURVES);
    const state = trained.map((job) => `${job.training_id} ${job.step}`).join();
    if (trained.length < 2 || state === drawn) return;
    const ids = new URLSearchParams(trained.map((job) => ["ids", job.training_id]));
    const { loss, samples_seen: seen } = await get(`gradient-accumulation/stats/compare?${ids}`, signal);
    drawn = state;
    figure.hidden = false;
    left.textContent = all.length > trained.length ? `The best ${number(trained.length)} of ${number(all.length)} jobs.` : "";
    for (const [place, job] of trained.entries()) colours.set(job.training_id, PALETTE[place % PALETTE.length]);
    render(sweep);
    curve.draw(
      trained.map((job, place) => ({
        x: seen,
        y: loss[job.training_id],
        name: valuesOf(job),
        colour: colours.get(job.training_id),
        dash: place < PALETTE.length ? "solid" : "dot",
      })),
      { summary: trained.map((job) => `${valuesOf(job)} ends at ${fixed(loss[job.training_id].at(-1))}`).join("; ") },
    );
  }

  async function look(sweep) {
    render(sweep);
    await drawLosses(sweep).catch((error) => {
      if (!(error instanceof ServiceError) || error.status !== 409) throw error;
      figure.hidden = true; // the jobs have no samples in common, at which they could be compared
    });
    return sweep.jobs.some((job) => !ENDED.includes(job.status));
  }

  if (await look(first)) await poll(async () => look(await get(path, signal)), EVERY, signal);
}

/** The order in which jobs are drawn: the best first, then by their losses. */
function rank(job, { best, decided_by: by }) {
  if (job.training_id === best) return -1;
  return (by === "validation_loss" ? job.validation_loss : job.loss) ?? Number.MAX_VALUE;
}

function summary({ jobs, best, decided_by: by, why_no_best: why }) {
  const ended = jobs.filter((job) => ENDED.includes(job.status)).length;
  const progress = ended === jobs.length ? "All jobs have ended" : `${number(ended)} of ${number(jobs.length)} jobs have ended`;
  const chosen = jobs.find((job) => job.training_id === best);
  if (!chosen) return why ? `${progress}. No job is named as the best: ${why}.` : `${progress}.`;
  const loss =
    by === "validation_loss" ? `validation loss ${fixed(chosen.validation_loss)}` : `training loss ${fixed(chosen.loss)}`;
  return `${progress}. Best${ended === jobs.length ? "" : " so far"}: ${valuesOf(chosen)}, with the lowest ${loss}.`;
}

const shown = (value) => (value === undefined ? "–" : typeof value === "string" ? value : JSON.stringify(value));

const valuesOf = (job) =>
  Object.entries(job.values)
    .map(([name, value]) => `${name.replaceAll("_", " ")} ${shown(value)}`)
    .join(", ");

/** For each cell, a string that it depends on and a function that creates it. */
function cells(job, { vary, best }, colour) {
  const plain = (text) => [text, () => text];
  const isBest = job.training_id === best;
  return [
    [
      String(colour),
      () =>
        h(
          "span",
          { class: "swatch" },
          colour && h("i", { class: `of-${colour}` }),
          h("a", { href: `#/job/${job.training_id}` }, `…${job.training_id.slice(-6)}`),
        ),
    ],
    ...vary.map((name) => plain(shown(job.values[name]))),
    [job.status, () => h("span", { class: `badge ${job.status}` }, job.status)],
    plain(job.steps_total ? `${number(job.step)} / ${number(job.steps_total)}` : number(job.step)),
    plain(fixed(job.loss)),
    plain(fixed(job.validation_loss)),
    [String(isBest), () => isBest && h("strong", { class: "is-ok" }, "best")],
  ];
}
