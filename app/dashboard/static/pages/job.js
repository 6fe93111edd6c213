/** One job: its progress, charts, events and result. */

import { follow, get, poll, query } from "../api.js";
import { chart, horizontalLine, preload } from "../charts.js";
import { announce, fill, h, table } from "../dom.js";
import { bytes, dateTime, duration, fixed, number, percent } from "../format.js";
import { help } from "../terms.js";
import { actions } from "./actions.js";
import { downloadButton } from "./downloads.js";
import { exportSection } from "./exports.js";
import { badge, method, scoresSequences, waitingReason } from "./jobs.js";
import { playground } from "./playground.js";

export const TITLE = "Job";

const EVERY = 1000;
const POINTS = 500;
const MOST_EVENTS = 500;
const ENDED = ["succeeded", "failed", "cancelled"];
const GIB = 2 ** 30;

export async function show(main, { id, signal }) {
  const path = `gradient-accumulation/training/${encodeURIComponent(id ?? "")}`;
  const state = makeState();
  const acting = h("div", {}); // separate, so that a button is not replaced while the user presses it
  const head = h(
    "section",
    { class: "panel", "aria-label": "State" },
    state.element,
    acting,
    h("p", { class: "muted" }, h("code", {}, id)),
  );
  const outcome = h("section", { class: "panel", "aria-label": "Outcome", hidden: true });
  const events = h("ol", { class: "events", reversed: true, tabindex: "0", "aria-label": "Events, newest first" });
  const charts = makeCharts();
  preload();

  const first = await get(path, signal); // fails here if the job does not exist
  const measured = h(
    "section",
    { class: "panel", "aria-label": "Charts", hidden: true },
    h(
      "div",
      { class: "charts" },
      Object.values(charts).map((each) => each.element),
    ),
  );
  main.append(
    h("h1", {}, first.model_name),
    head,
    outcome,
    measured,
    h("section", { class: "panel", "aria-label": "Events" }, h("h2", {}, "Events"), events),
    settings(first),
  );

  let drawn = "";
  let shownActions = "";
  let status = null;
  async function look() {
    const job = await get(path, signal);
    state.show(job);
    const possible = `${job.status} ${job.requested}`;
    if (possible !== shownActions) {
      shownActions = possible;
      fill(acting, actions(job, lookAgain));
    }
    const progress = `${job.status} ${job.attempt} ${job.progress.step}`;
    if (progress !== drawn) {
      drawn = progress;
      const series = await get(`${path}/metrics?points=${POINTS}`, signal);
      measured.hidden = !series.data.length;
      if (series.data.length) await draw(charts, series, job);
    }
    if (status !== null && status !== job.status) announce(`The job is ${job.status}.`);
    status = job.status;
    if (!ENDED.includes(job.status)) return true;
    await showOutcome(outcome, job, signal);
    return false;
  }
  const showEvent = (event) => {
    events.prepend(
      h(
        "li",
        {},
        h(
          "time",
          { datetime: new Date(event.created_at * 1000).toISOString() },
          new Date(event.created_at * 1000).toLocaleTimeString(),
        ),
        h("span", { class: event.level === "error" ? "is-bad" : event.level === "warning" ? "is-warn" : "" }, event.message),
      ),
    );
    if (events.childElementCount > MOST_EVENTS) events.lastElementChild.remove();
  };
  let lastEvent = "";
  const going = new Set();
  async function keep(name, action) {
    if (going.has(name)) return;
    going.add(name);
    await action().finally(() => going.delete(name));
  }
  const followOn = async () => {
    lastEvent = await follow(id, showEvent, signal, lastEvent);
  };
  const watch = () => Promise.all([keep("state", () => poll(look, EVERY, signal)), keep("events", followOn)]);
  /** After an action: a job that had ended may be queued again. */
  async function lookAgain() {
    if (await look()) watch().catch(console.warn);
  }
  await watch();
}

function makeCharts() {
  return {
    loss: chart("Loss", { x: "step", y: "loss" }, help("loss")),
    rewards: chart("Rewards", { x: "step", y: "mean over the samples" }, help("rewards")),
    rate: chart("Learning rate", { x: "step", y: "" }, help("learning_rate")),
    norm: chart("Gradient norm", { x: "step", y: "before clipping" }, help("grad_norm")),
    throughput: chart("Throughput", { x: "step", y: "tokens a second", format: "~s" }, help("throughput")),
    memory: chart("Memory", { x: "step", y: "GiB" }, help("memory")),
    noise: chart("Noise scale", { x: "step", y: "samples" }, help("noise_scale")),
    heat: chart("GPU temperature", { x: "step", y: "degrees Celsius" }),
  };
}

/** Draws all charts from the log lines; there must be at least one line. */
async function draw(charts, { data: lines, evaluations }, job) {
  const x = lines.map((line) => line.step);
  const of = (name) => lines.map((line) => line[name]);
  const trace = (name, shown, more = {}) => ({ x, y: of(name), name: shown, ...more });
  const span = (name, digits) =>
    `from ${fixed(lines[0][name], digits)} to ${fixed(lines.at(-1)[name], digits)} over ${number(lines.at(-1).step)} steps`;
  const device = job.plan.devices[0];
  const withNoiseScale = lines.filter((line) => line.noise_scale !== null);
  charts.noise.element.hidden = !withNoiseScale.length;
  const withTemperature = lines.filter((line) => line.temperature_celsius !== null);
  charts.heat.element.hidden = !withTemperature.length;
  const withRewards = lines.filter((line) => line.rewards);
  charts.rewards.element.hidden = !withRewards.length;
  const reward = (name, shown, colour) => ({
    x: withRewards.map((line) => line.step),
    y: withRewards.map((line) => line.rewards[name]),
    name: shown,
    colour,
  });
  const evaluated = evaluations.filter((each) => each.loss !== null);
  const validation = {
    x: evaluated.map((each) => each.step),
    y: evaluated.map((each) => each.loss),
    name: "on held-out samples",
    colour: "second",
    mode: "lines+markers",
  };
  const best = evaluated.length
    ? ` On held-out samples: last ${fixed(evaluated.at(-1).loss, 3)}, best ${fixed(Math.min(...validation.y), 3)}.`
    : "";
  await Promise.all([
    charts.loss.draw(
      [
        trace("loss", "loss", { colour: "soft", width: 1 }),
        trace("loss_ema", "moving average"),
        ...(evaluated.length ? [validation] : []),
      ],
      { summary: `Loss ${span("loss_ema", 3)}.${best}` },
    ),
    withRewards.length &&
      charts.rewards.draw(
        [reward("chosen", "chosen", "ok"), reward("rejected", "rejected", "bad"), reward("margin", "margin", "accent")],
        {
          summary: `Margin between rewards from ${fixed(withRewards[0].rewards.margin)} to ${fixed(withRewards.at(-1).rewards.margin)}.`,
        },
      ),
    charts.rate.draw([trace("learning_rate", "learning rate", { colour: "second" })], {
      summary: `Learning rate ${span("learning_rate", 6)}.`,
    }),
    charts.norm.draw([trace("grad_norm", "norm", { colour: "third", width: 1 })], {
      summary: `Gradient norm ${span("grad_norm", 3)}.`,
    }),
    charts.throughput.draw([trace("tokens_per_second", "tokens/s", { colour: "fourth", width: 1 })], {
      summary: `Tokens a second ${span("tokens_per_second", 0)}.`,
    }),
    charts.memory.draw(
      [
        trace("peak_gb", "peak so far"),
        {
          x: [x[0], x.at(-1)],
          y: Array(2).fill(device.predicted_peak_bytes / GIB),
          name: "predicted for the longest sample",
          colour: "second",
          dash: "dash",
        },
      ],
      {
        summary: `Peak memory ${span("peak_gb", 2)} GiB, predicted at full length ${bytes(device.predicted_peak_bytes)}.`,
        shapes: isLimitNear(device, lines) ? [horizontalLine(device.memory_limit_bytes / GIB, "bad")] : [],
      },
    ),
    withNoiseScale.length &&
      charts.noise.draw(
        [
          {
            x: withNoiseScale.map((line) => line.step),
            y: withNoiseScale.map((line) => line.noise_scale),
            name: "noise scale",
            colour: "ok",
          },
        ],
        { summary: "Noise scale as measured." },
      ),
    withTemperature.length &&
      charts.heat.draw(
        [
          {
            x: withTemperature.map((line) => line.step),
            y: withTemperature.map((line) => line.temperature_celsius),
            name: "GPU",
            colour: "bad",
          },
        ],
        {
          summary: `The GPU reached at most ${number(Math.max(...withTemperature.map((line) => line.temperature_celsius)))} degrees Celsius.`,
        },
      ),
  ]);
}

/** Whether the memory limit is close enough to draw it without flattening the other lines. */
function isLimitNear(device, lines) {
  const highest = Math.max(device.predicted_peak_bytes / GIB, ...lines.map((line) => line.peak_gb ?? 0));
  return device.memory_limit_bytes / GIB < 3 * highest;
}

/** A job's progress. Built once and then updated in place, so that no control moves away from a pointer or screen reader. */
function makeState() {
  const verdict = h("p", { class: "verdict" });
  const error = h("p", { class: "is-bad" });
  const bar = h("progress", { "aria-label": "Steps completed" });
  const facts = {
    batch: ["Effective batch", "effective"],
    loss: ["Loss, moving average", "loss"],
    speed: ["Tokens a second", "throughput"],
    memory: ["Peak memory", "memory"],
    samples: ["Samples seen"],
    device: ["Device"],
    begun: ["Started"],
    attempt: ["Attempt"],
  };
  const values = Object.fromEntries(Object.keys(facts).map((name) => [name, h("dd", {})]));
  const list = h(
    "dl",
    { class: "facts" },
    Object.entries(facts).map(([name, [title, term]]) => h("div", {}, h("dt", {}, title, term && help(term)), values[name])),
  );

  const devices = h("div", { hidden: true });

  function show(job) {
    const { progress, plan } = job;
    const total = progress.steps_total;
    const left = job.status === "running" && progress.eta_seconds ? `, ${duration(progress.eta_seconds)} left` : "";
    const within = progress.within_window ? `, ${number(progress.accumulation_step)} micro-batches into the next step` : "";
    fill(
      verdict,
      badge(job),
      h(
        "span",
        {},
        job.status === "queued"
          ? waitingReason(job)
          : job.status === "running" && progress.samples_to_prepare
            ? `Prepared ${number(progress.prepared_samples)} of ${number(progress.samples_to_prepare)} samples`
            : `Step ${number(progress.step)}${total ? ` of ${number(total)}` : ""}${within}${left}`,
      ),
    );
    error.textContent = job.error?.message ?? "";
    bar.max = total ?? 1;
    if (total || ENDED.includes(job.status)) bar.value = total ? progress.step : 1;
    if (progress.samples_to_prepare && job.status === "running") {
      bar.max = progress.samples_to_prepare;
      bar.value = progress.prepared_samples;
    }
    const shown = {
      batch: split(job),
      loss: fixed(progress.loss_ema),
      speed: number(progress.tokens_per_second),
      memory: `${bytes(progress.memory_peak_bytes)} (predicted: ${bytes(plan.ranks[0].predicted_peak_bytes)})`,
      samples: number(progress.samples_seen),
      device: `${job.device ?? plan.device}${plan.predicted ? " (predicted)" : `, ${plan.precision}`}`,
      begun: dateTime(job.started_at),
      attempt: number(job.attempt),
    };
    for (const [name, text] of Object.entries(shown)) values[name].textContent = text;
    devices.hidden = plan.ranks.length === 1;
    if (plan.ranks.length > 1) fill(devices, ranks(job));
  }
  return { element: h("div", {}, verdict, error, bar, list, devices), show };
}

/** What each of several devices has done; before the first step, what is planned for it. */
function ranks({ plan, progress }) {
  const done = progress.ranks ?? [];
  return table(
    "Devices of this job",
    [
      { title: "Device" },
      { title: "Micro-batches", number: true },
      { title: "Share of the tokens", number: true },
      { title: "Tokens a second", number: true },
      { title: "Idle", number: true },
      { title: "Peak memory", number: true },
      { title: "Predicted", number: true },
    ],
    plan.ranks.map((rank, place) => {
      const own = done[place];
      const all = done.reduce((sum, each) => sum + each.tokens, 0);
      return [
        `${rank.gpu_id}${rank.name ? ` (${rank.name})` : ""}`,
        own ? number(own.micro_batches) : "–",
        percent(own ? own.tokens / all : rank.share_of_tokens),
        own ? number(own.tokens_per_second) : "–",
        own ? percent(own.idle_share) : "–",
        own?.peak_gb ? bytes(own.peak_gb * GIB) : "–",
        bytes(rank.predicted_peak_bytes),
      ];
    }),
  );
}

/** Before the first step, the plan's split for full-length samples; then the measured mean, which is lower for short samples. */
function split({ plan, progress }) {
  const whole = number(plan.effective_batch_size);
  const devices = plan.ranks.length;
  if (!progress.step) {
    const micro = `${number(plan.accumulation_steps)} micro-batch${plan.accumulation_steps === 1 ? "" : "es"}`;
    const on = devices > 1 ? ` on each of ${devices} devices` : "";
    return `${whole} in ${micro} of at most ${number(plan.actual_batch_size_per_gpu)}${on}`;
  }
  const each = Math.round((10 * progress.micro_step) / progress.step) / 10;
  return `${whole} in ${number(each)} micro-batch${each === 1 ? "" : "es"}`;
}

const fact = (name, value, term) => h("div", {}, h("dt", {}, name, term && help(term)), h("dd", {}, value));

async function showOutcome(outcome, job, signal) {
  const { result } = job;
  outcome.hidden = !result;
  if (!result) return;
  const path = `gradient-accumulation/training/${job.id}`;
  const [{ stats }, completions, { evaluations }] = await Promise.all([
    get(`gradient-accumulation/stats/${job.id}`, signal),
    get(`${path}/completions`, signal),
    get(`${path}/metrics?points=2`, signal),
  ]);
  const certificate =
    result.equivalence_error === null ? "not computed" : `relative difference ${result.equivalence_error.toExponential(1)}`;
  const noise = result.noise_scale;
  const classifies = job.training_config.objective === "classification";
  fill(
    outcome,
    h("h2", {}, "Result"),
    h(
      "dl",
      { class: "facts" },
      fact("Loss, first and last", `${fixed(result.first_loss)} → ${fixed(result.final_loss)}`, "loss"),
      result.eval_loss !== null && fact("Loss on held-out samples", fixed(result.eval_loss), "validation"),
      result.eval_token_accuracy !== null &&
        fact(
          classifies ? "Held-out texts classified correctly" : "Tokens of held-out samples predicted correctly",
          percent(result.eval_token_accuracy),
        ),
      typeof result.eval_exact_match === "number" &&
        !classifies &&
        fact("Held-out samples predicted entirely", percent(result.eval_exact_match)),
      typeof result.eval_rewards?.accuracy === "number" &&
        fact("Held-out pairs in the right order", percent(result.eval_rewards.accuracy), "rewards"),
      typeof result.eval_rewards?.margin === "number" &&
        fact("Margin between rewards, held-out", fixed(result.eval_rewards.margin), "rewards"),
      ownMetrics(evaluations),
      fact(classifies ? "Texts trained on" : "Target tokens trained on", number(result.trained_tokens)),
      fact("Gradient check", certificate, "certificate"),
      noise && fact("Noise scale", formatNoiseScale(noise), "noise_scale"),
      fact("Samples a second", number(stats.samples_per_second)),
      fact("Padding", percent(stats.padding_share)),
      fact("Memory prediction error", percent(stats.prediction_error), "prediction"),
      fact("Recoveries from out of memory", number(stats.oom_recoveries)),
    ),
    h(
      "p",
      { class: "actions" },
      result.model_path && downloadButton("Download the model", `${path}/model`, `${job.id}.tar`, "primary"),
      result.model_path && h("a", { href: `#/plan${query({ model: job.id, method: method(job) })}` }, "Train it further"),
      downloadButton("Metrics as CSV", `${path}/metrics?format=csv`, `${job.id}.csv`),
      downloadButton("Log", `${path}/log`, `${job.id}.jsonl`),
      job.links.profile && downloadButton("Trace", `${path}/profile/trace.json`, `${job.id}-trace.json`),
      h("a", { href: `#/recommendations?training_id=${job.id}` }, "Recommendations for the next job"),
    ),
    result.model_path && !scoresSequences(job) && playground(job, signal),
    result.model_path && exportSection(job, signal),
    completions.data.length ? h("div", { class: "samples" }, samples(completions.data)) : null,
  );
}

/** The operator's own metrics, before and after training. */
function ownMetrics(evaluations) {
  const measured = evaluations.filter((each) => each.metrics);
  const names = [...new Set(measured.flatMap((each) => Object.keys(each.metrics)))];
  return names.map((name) => {
    const values = measured.map((each) => each.metrics[name]).filter((value) => value !== undefined);
    return fact(name, `${fixed(values[0])} → ${fixed(values.at(-1))}`, "own_metrics");
  });
}

/** How the model completes held-out prompts, before and after training and at evaluations. */
function samples(completions) {
  const said = (text) => h("span", { class: "said" }, text ?? "–");
  return [
    h("h2", {}, "Held-out prompts ", help("completions")),
    table(
      "Greedy completions before and after training",
      [{ title: "Prompt" }, { title: "Expected" }, { title: "Before" }, { title: "After" }],
      completions.map((each) => [
        said(each.prompt),
        said(each.expected),
        said(each.before),
        [said(each.after), earlier(each.at_evaluations)],
      ]),
    ),
  ];
}

/** A prompt's completions at evaluations, the newest first; to be opened. */
function earlier(completions) {
  return (
    completions.length > 0 &&
    h(
      "details",
      {},
      h("summary", {}, "At evaluations"),
      [...completions]
        .reverse()
        .map(({ step, text }) => h("p", {}, h("strong", {}, `step ${number(step)} `), h("span", { class: "said" }, text))),
    )
  );
}

/** The noise scale with its 90 % interval. */
const formatNoiseScale = ({ value, low, high }) =>
  `${number(value)} (${number(low)} to ${high === null ? "unbounded" : number(high)})`;

/** All settings of the job, requested ones and defaults. */
function settings(job) {
  const list = (title, values) => [
    h("h2", {}, title),
    h(
      "dl",
      { class: "facts" },
      Object.entries(values)
        .filter(([, value]) => value !== null && !(Array.isArray(value) && !value.length))
        .map(([name, value]) =>
          fact(name.replaceAll("_", " "), typeof value === "object" ? JSON.stringify(value) : String(value)),
        ),
    ),
  ];
  return h(
    "details",
    { class: "panel" },
    h("summary", {}, "Full configuration"),
    list("Training", job.training_config),
    list("Accumulation", job.config),
    list("Data", job.dataset),
  );
}
