/** Compares jobs' losses at the same number of samples seen, and how noisy each is relative to the first. */

import { get } from "../api.js";
import { chart, PALETTE, preload } from "../charts.js";
import { fill, h, table } from "../dom.js";
import { fixed, number, percent } from "../format.js";
import { help } from "../terms.js";
import { badge, method } from "./jobs.js";

export const TITLE = "Compare";

const COLUMNS = [
  "Job",
  "Batch",
  "Steps",
  "Loss",
  "Final loss",
  "Noise",
  "Noise relative to the first",
  "Tokens/s",
  "Peak GiB",
  "Padding",
];
const MAX_JOBS = 10;

export async function show(main, { chosen, signal }) {
  preload();
  const { data } = await get("gradient-accumulation/training?limit=100", signal);
  const trained = data.filter((job) => job.progress.step > 1);
  const ids = (chosen.get("ids") ?? "").split(",").filter(Boolean);
  const older = ids.filter((id) => !trained.some((job) => job.id === id)).slice(0, MAX_JOBS);
  const found = await Promise.all(older.map((id) => get(`gradient-accumulation/training/${id}`, signal).catch(() => null)));
  trained.push(...found.filter(Boolean));
  const result = h("div", {});
  const curve = chart("Loss", { x: "samples seen", y: "loss, mean over equally many samples" }, help("loss"));
  const figure = h("section", { class: "panel", "aria-label": "Losses", hidden: true }, curve.element);
  const list = h(
    "ul",
    { class: "legend" },
    trained.map((job) =>
      h(
        "li",
        {},
        h(
          "label",
          {},
          h("input", { type: "checkbox", value: job.id, checked: ids.includes(job.id), onchange: choose }),
          ` …${job.id.slice(-6)} `,
          badge(job),
          ` ${job.model_name}, ${method(job)}, batch ${number(job.effective_batch_size)}`,
        ),
      ),
    ),
  );

  function choose() {
    const ticked = [...list.querySelectorAll("input:checked")].map((input) => input.value);
    const kept = [...ids.filter((id) => ticked.includes(id)), ...ticked.filter((id) => !ids.includes(id))];
    ids.splice(0, ids.length, ...kept);
    history.replaceState(null, "", `#/compare${ids.length ? `?ids=${ids.join(",")}` : ""}`);
    compare();
  }

  async function compare() {
    figure.hidden = ids.length < 2;
    if (ids.length < 2 || ids.length > MAX_JOBS) {
      fill(result, h("p", { class: "muted" }, `Choose two to ${MAX_JOBS} jobs.`));
      return;
    }
    try {
      const query = new URLSearchParams(ids.map((id) => ["ids", id]));
      showComparison(await get(`gradient-accumulation/stats/compare?${query}`, signal));
    } catch (error) {
      if (signal.aborted) return;
      figure.hidden = true;
      fill(result, h("p", { class: "is-bad", role: "alert" }, error.message));
    }
  }

  function showComparison({ jobs, loss, samples_seen: seen, averaged_samples: averaged, why_not_comparable: why }) {
    const colourName = (place) => PALETTE[place % PALETTE.length];
    const name = (job) => `…${job.training_id.slice(-6)}: batch ${job.effective_batch_size}`;
    curve.draw(
      jobs.map((job, place) => ({
        x: seen,
        y: loss[job.training_id],
        name: name(job),
        colour: colourName(place),
        dash: place < PALETTE.length ? "solid" : "dot",
      })),
      { summary: jobs.map((job) => `${name(job)} ends at ${fixed(loss[job.training_id].at(-1))}`).join("; ") },
    );
    fill(
      result,
      table(
        `Loss after ${number(Math.round(seen.at(-1)))} samples, which all of them have seen: the mean of the last ${number(averaged)}`,
        COLUMNS.map((title, place) => ({ title, number: place > 0 })),
        jobs.map((job, place) => [
          h(
            "span",
            { class: "swatch" },
            h("i", { class: `of-${colourName(place)}` }),
            h("a", { href: `#/job/${job.training_id}` }, name(job)),
          ),
          `${number(job.effective_batch_size)} in ${number(job.stats.accumulation_steps)} micro-batch${job.stats.accumulation_steps === 1 ? "" : "es"}${job.stats.ranks ? ` on each of ${job.stats.ranks.length} devices` : ""}`,
          number(job.steps),
          fixed(loss[job.training_id].at(-1)),
          fixed(job.final_loss),
          job.loss_noise.toExponential(2),
          job.noise_ratio === null ? "–" : `× ${fixed(job.noise_ratio, 2)}`,
          number(job.stats.tokens_per_second),
          fixed(job.stats.peak_memory_gb, 2),
          percent(job.stats.padding_share),
        ]),
      ),
      why && h("p", { class: "is-bad" }, `Warning: ${why}.`),
      h("p", { class: "muted" }, "Noise is the variance of the loss around its trend. ", help("noise")),
    );
  }

  main.append(
    h("h1", {}, "Compare jobs"),
    h(
      "section",
      { class: "panel", "aria-label": "Jobs to compare" },
      trained.length ? list : h("p", { class: "muted" }, "No job has completed two steps yet."),
    ),
    figure,
    h("section", { class: "panel", "aria-label": "Figures" }, result),
  );
  await compare();
}
