/** Plans a job: shows whether and how it fits, and starts it. */

import { delay, get, messageOf, post, query, ServiceError, upload } from "../api.js";
import { chart, horizontalLine } from "../charts.js";
import { announce, fill, h, table } from "../dom.js";
import { bytes, duration, number, percent } from "../format.js";
import { field, select } from "../terms.js";
import { showData } from "./data.js";

export const TITLE = "Plan";

const ROOT = "gradient-accumulation";
const SAVED = "accrue.plans";
const AFTER_TYPING = 250;
const SIMULATED_WITHIN = 20;
const DEFAULTS = {
  model: "accrue/tiny-gpt2",
  batch: "target",
  target: "32",
  micro: "8",
  steps: "4",
  count: "1",
  method: "full",
  optimizer: "adamw",
  precision: "auto",
  epochs: "3",
};
const PARTS = ["weights", "gradients", "optimizer", "activations", "logits", "workspace", "context"];

/** Fields that take several values, separated by commas, for a sweep: the form's names and the service's. */
const SWEPT = { rate: "learning_rate", target: "effective_batch_size" };

/** Maps the service's field names to the form's. */
const FORM_FIELDS = {
  model_name: "model",
  gpus: "gpus",
  num_gpus: "count",
  max_length: "length",
  target_effective_batch_size: "target",
  micro_batch_size: "micro",
  accumulation_steps: "steps",
  learning_rate: "rate",
  objective: "objective",
  file_id: "file",
  validation_split: "validation",
  gradient_checkpointing: "checkpointing",
};

export async function show(main, { chosen, signal }) {
  const inputs = makeInputs(chosen);
  const values = () =>
    Object.fromEntries(
      Object.entries(inputs).map(([name, input]) => [
        name,
        input.type === "checkbox" ? (input.checked ? "true" : "") : input.value.trim(),
      ]),
    );
  const fileFormat = () => inputs.file.selectedOptions[0]?.dataset.format;
  const effective = h("output", { class: "effective", for: "field-target field-micro field-steps field-count" });
  // Shown on narrow screens only, where the full prediction is far below the form.
  const shortVerdict = h("p", { class: "briefly", "aria-live": "polite" });
  const result = h(
    "section",
    { class: "panel", "aria-label": "Prediction", "aria-live": "off" },
    h("p", { class: "muted" }, "…"),
  );
  const starting = h("div", { role: "status" });
  const data = h("section", { class: "panel", "aria-label": "Data", "aria-live": "polite", hidden: true });
  const form = h("form", { onsubmit: (event) => event.preventDefault() });
  const speed = chart("Memory against speed", { x: "samples a second, measured on this kind of device", y: "peak memory, GiB" });

  let pendingPrediction = new AbortController();
  async function predict(wait) {
    pendingPrediction.abort();
    pendingPrediction = new AbortController();
    const own = AbortSignal.any([pendingPrediction.signal, signal]);
    try {
      await delay(wait, own);
      const shown = values();
      for (const within of [0, SIMULATED_WITHIN]) {
        const answer = await requestPrediction(shown, fileFormat(), within, own);
        showAnswer(result, answer, shown, apply, speed);
        shortVerdict.textContent = verdict(answer);
        shortVerdict.className = `briefly ${answer.fits ? "is-ok" : "is-bad"}`;
      }
    } catch (error) {
      if (own.aborted) return;
      if (!(error instanceof ServiceError)) throw error;
      showRefusal(error);
      document.getElementById("speed").hidden = true;
      fill(result, h("p", { class: "verdict is-bad" }, "This cannot be planned"), h("p", {}, error.message));
    }
  }

  /** Runs on every input: updates the label and the URL at once, and the prediction after a short delay. */
  function changed(wait = AFTER_TYPING) {
    const shown = values();
    fill(starting);
    history.replaceState(null, "", `#/plan${query(nonDefaults(shown))}`);
    for (const name of ["target"]) inputs[name].closest(".field").hidden = shown.batch !== "target";
    for (const name of ["micro", "steps"]) inputs[name].closest(".field").hidden = shown.batch === "target";
    const batch = effectiveBatch(shown);
    const jobs = Object.values(varied(shown) ?? {}).reduce((product, each) => product * each.length, 1);
    const sweep = jobs > 1 ? ` (the first of ${number(jobs)} jobs, one for each combination)` : "";
    effective.textContent = batch
      ? `→ Effective batch: ${number(batch)}${sweep}`
      : "→ Effective batch: enter whole numbers above zero";
    inputs.rate.placeholder = usualRate(values(), fileFormat());
    shortVerdict.textContent = "";
    clearRefusals(form);
    predict(wait).catch((error) => {
      if (!signal.aborted) fill(result, h("p", {}, error.message));
    });
  }

  function apply(changes) {
    for (const [name, value] of Object.entries(changes)) {
      if (inputs[name].type === "checkbox") inputs[name].checked = value === "true";
      else inputs[name].value = value;
    }
    changed();
    announce("The plan was changed.");
  }

  const load = (kept) =>
    apply({ ...Object.fromEntries(Object.keys(inputs).map((name) => [name, DEFAULTS[name] ?? ""])), ...kept });

  const files = fileChoice(inputs.file);
  form.append(
    h(
      "fieldset",
      { class: "fields" },
      h("legend", {}, "Model and device"),
      wide(field("model", "Model", inputs.model, "model")),
      h("datalist", { id: "models" }),
      field("method", "Method", inputs.method, "method"),
      field("length", "Sequence length", inputs.length, "length"),
      field("gpus", "GPU to plan for", inputs.gpus, "device"),
      field("count", "Devices", inputs.count, "count"),
      field("optimizer", "Optimizer", inputs.optimizer, "optimizer"),
      field("precision", "Precision", inputs.precision, "precision"),
      check(field("checkpointing", "Gradient checkpointing", inputs.checkpointing, "checkpointing")),
    ),
    h(
      "fieldset",
      { class: "fields" },
      h("legend", {}, "Batch"),
      wide(field("batch", "Set batch by", inputs.batch)),
      field("target", "Effective batch", inputs.target, "effective"),
      field("micro", "Micro-batch size", inputs.micro, "micro"),
      field("steps", "Accumulation steps", inputs.steps, "steps"),
    ),
    effective,
    shortVerdict,
    h(
      "fieldset",
      { class: "fields" },
      h("legend", {}, "Training"),
      wide(field("file", "Data", inputs.file)),
      wide(files.upload),
      field("objective", "Objective", inputs.objective, "objective"),
      field("epochs", "Epochs", inputs.epochs, "epochs"),
      field("rate", "Learning rate", inputs.rate, "rate"),
      field("validation", "Validation split", inputs.validation, "validation"),
    ),
    h(
      "p",
      { class: "actions" },
      h("button", { type: "button", class: "primary", id: "start", onclick: (event) => submitJob(event.target, false) }, "Start"),
      h("button", { type: "button", onclick: (event) => submitJob(event.target, true) }, "Dry run"),
      h("button", { type: "button", onclick: (event) => lookAtData(event.target) }, "Preview data"),
    ),
    starting,
  );
  form.addEventListener("input", () => changed());

  /** The Idempotency-Key: if an answer is lost, pressing Start again does not create a second job. */
  let idempotencyKey = crypto.randomUUID?.() ?? String(Math.random());
  async function submitJob(button, dry) {
    clearRefusals(form);
    await waitForUpload(button);
    if (!isComplete(values())) return;
    button.disabled = true;
    try {
      const vary = varied(values());
      const made = await post(
        vary ? `${ROOT}/sweeps` : `${ROOT}/training/with-accumulation`,
        { ...jobRequestBody(values()), ...(vary ? { vary } : {}), dry_run: dry },
        { idempotencyKey: dry ? null : idempotencyKey },
      );
      if (!dry) location.hash = vary ? `#/sweep/${made.name}` : `#/job/${made.id}`;
      else
        fill(
          starting,
          vary ? made.jobs.map(sweptDryRun) : h("p", {}, h("span", { class: "is-ok" }, "This would run: "), dryRun(made)),
        );
    } catch (error) {
      if (signal.aborted) return;
      if (!(error instanceof ServiceError)) {
        const again = dry ? "" : " Once it answers, press Start again: nothing is started twice.";
        fill(starting, h("p", { class: "is-bad", role: "alert" }, messageOf(error) + again));
        return;
      }
      idempotencyKey = crypto.randomUUID?.() ?? String(Math.random());
      if (!showRefusal(error)) fill(starting, h("p", { class: "is-bad", role: "alert" }, error.message));
    } finally {
      button.disabled = false;
    }
  }

  async function waitForUpload(button) {
    if (!files.uploading()) return;
    button.disabled = true;
    fill(starting, h("p", { class: "muted", role: "status" }, "The file is being uploaded …"));
    await files.uploading();
    fill(starting);
    button.disabled = false;
  }

  async function lookAtData(button) {
    clearRefusals(form);
    await waitForUpload(button);
    const { file, model, length } = values();
    if (!file) return mark("file", "Choose a file, or upload one.");
    button.disabled = true;
    data.hidden = false;
    fill(data, h("p", { class: "muted" }, "A worker is reading the data …"));
    try {
      showData(data, await get(`${ROOT}/datasets/${file}/preview${query({ model_name: model, max_length: length })}`, signal));
    } catch (error) {
      if (signal.aborted) return;
      fill(data, h("p", { class: "is-bad", role: "alert" }, messageOf(error)));
    } finally {
      button.disabled = false;
      data.scrollIntoView({ block: "nearest" });
    }
  }

  main.append(
    h("h1", {}, "Plan a job"),
    h(
      "div",
      { class: "columns" },
      h(
        "div",
        {},
        h("section", { class: "panel", "aria-label": "What to train" }, form),
        savedPlans(() => nonDefaults(values()), load),
      ),
      h("div", {}, result, data, h("section", { class: "panel", id: "speed", hidden: true }, speed.element)),
    ),
  );
  changed(0);
  await Promise.all([fillModels(form, signal), files.load(signal, chosen.get("file"))]);
}

function makeInputs(chosen) {
  const at = (name) => chosen.get(name) ?? DEFAULTS[name] ?? "";
  const text = (name, more = {}) =>
    h("input", { type: "text", value: at(name), autocomplete: "off", spellcheck: "false", ...more });
  const whole = (name, more = {}) => text(name, { inputmode: "numeric", ...more });
  return {
    model: text("model", { list: "models" }),
    method: select(["full", "lora", "qlora"], at("method")),
    length: whole("length", { placeholder: "the model's, at most 1024" }),
    gpus: text("gpus", { placeholder: "24GB" }),
    count: whole("count"),
    optimizer: select(["adamw", "adamw_8bit", "lion", "lamb", "lars", "sgd", "adafactor"], at("optimizer")),
    precision: select([["auto", "auto"], "bf16", "fp16", ["no", "fp32"], "tf32", "pure_bf16"], at("precision")),
    checkpointing: h("input", { type: "checkbox", checked: at("checkpointing") === "true" }),
    batch: select(
      [
        ["target", "effective batch (Accrue plans the split)"],
        ["split", "micro-batch size and accumulation steps"],
      ],
      at("batch"),
    ),
    target: text("target"), // a keypad for numbers has no comma
    micro: whole("micro"),
    steps: whole("steps"),
    file: h("select", {}),
    objective: select(
      [["", "auto"], ["sft", "sft: supervised"], "dpo", "orpo", "simpo", "kto", "reward", "classification"],
      at("objective"),
    ),
    epochs: whole("epochs"),
    rate: text("rate"),
    validation: text("validation", { inputmode: "decimal", placeholder: "none; 0.1 is usual" }),
  };
}

const wide = (element) => {
  element.classList.add("wide");
  return element;
};
const check = (element) => {
  element.classList.add("check");
  element.prepend(element.querySelector("input"));
  return element;
};

/** The values that differ from the defaults. */
function nonDefaults(values) {
  return Object.fromEntries(Object.entries(values).filter(([name, value]) => value !== (DEFAULTS[name] ?? "")));
}

/** The objective: the chosen one, or that which the service uses for data of this format. */
function objectiveFor({ objective }, format) {
  return objective || ({ preference: "dpo", unpaired_preference: "kto", classification: "classification" }[format] ?? "sft");
}

/** The learning rates of objectives other than preferences, for full fine-tuning and for adapters. */
const RATES = { sft: ["5e-5", "2e-4"], classification: ["5e-5", "2e-4"], reward: ["1e-5", "1e-4"] };

/** The learning rate that the service uses if none is given. */
function usualRate({ method, ...values }, format) {
  const [full, adapters] = RATES[objectiveFor(values, format)] ?? ["1e-6", "1e-5"];
  return method === "full" ? full : adapters;
}

const whole = (text) => (/^[1-9]\d{0,8}$/.test(text) ? Number(text) : null);

/** The values of a field, which are separated by commas. */
const listed = (text) => text.split(",").map((each) => each.trim());

/** The fields with several values, by the service's names; null without any. */
function varied(values) {
  const several = Object.entries(SWEPT).filter(
    ([name]) => listed(values[name]).length > 1 && (name !== "target" || values.batch === "target"),
  );
  return several.length ? Object.fromEntries(several.map(([name, field]) => [field, listed(values[name]).map(asNumber)])) : null;
}

function effectiveBatch({ batch, target, micro, steps, count }) {
  if (batch === "target") return whole(listed(target)[0]);
  const factors = [micro, steps, count].map(whole);
  return factors.includes(null) ? null : factors.reduce((product, factor) => product * factor);
}

/** Converts text to a number. Sends other text unchanged, so that the service's error names the field. */
const asNumber = (text) => (text === "" ? undefined : Number.isNaN(Number(text)) ? text : Number(text));

function requestPrediction(values, format, wait, signal) {
  const count = Math.min(whole(values.count) ?? 1, 1024);
  return post(
    `${ROOT}/calculate-batch-size`,
    {
      model_name: values.model,
      target_effective_batch_size: effectiveBatch(values) ?? asNumber(values.batch === "target" ? values.target : values.steps),
      micro_batch_size: values.batch === "split" ? asNumber(values.micro) : undefined,
      num_gpus: count,
      gpus: values.gpus ? Array(count).fill(values.gpus) : undefined,
      max_length: asNumber(values.length),
      objective: objectiveFor(values, format),
      method: values.method,
      optimizer: values.optimizer,
      mixed_precision: values.precision === "auto" ? true : values.precision,
      gradient_checkpointing: values.checkpointing === "true",
      wait_seconds: wait,
    },
    { signal },
  );
}

function jobRequestBody(values) {
  const split =
    values.batch === "split"
      ? { micro_batch_size: asNumber(values.micro), accumulation_steps: asNumber(values.steps) }
      : { target_effective_batch_size: asNumber(listed(values.target)[0]) };
  return {
    model_name: values.model,
    dataset_config: { file_id: values.file, max_length: asNumber(values.length), validation_split: asNumber(values.validation) },
    training_config: {
      epochs: asNumber(values.epochs),
      learning_rate: asNumber(listed(values.rate)[0]),
      objective: values.objective || undefined,
      method: values.method,
      optimizer: values.optimizer,
      gradient_checkpointing: values.checkpointing === "true",
    },
    mixed_precision: values.precision === "auto" ? true : values.precision,
    num_gpus: whole(values.count) ?? undefined,
    ...split,
  };
}

function dryRun(job) {
  const { plan } = job;
  const micro = `${number(plan.micro_batches)} micro-batch${plan.micro_batches === 1 ? "" : "es"}`;
  const samples = `${number(plan.effective_batch_size)} samples`;
  const steps =
    plan.steps_total === null
      ? `${samples} per step, in ${micro}`
      : `${number(plan.steps_total)} steps of ${samples}, each step in ${micro}`;
  const time =
    job.predicted_duration_seconds === null
      ? "no duration estimate: no comparable run yet"
      : `about ${duration(job.predicted_duration_seconds)} (${job.predicted_duration_range.map(duration).join(" to ")})`;
  const cost = job.gpu_cost === null ? "" : `, GPU cost ${number(job.gpu_cost)}`;
  return `${steps}; ${time}${cost}. ${plan.warnings.join(" ")}`;
}

function sweptDryRun({ values, plan }) {
  const own = Object.entries(values).map(([name, value]) => `${name.replaceAll("_", " ")} ${value}`);
  return h("p", {}, h("span", { class: "is-ok" }, `With ${own.join(", ")}: `), dryRun(plan));
}

function clearRefusals(form) {
  for (const message of form.querySelectorAll(".wrong")) message.textContent = "";
  for (const input of form.querySelectorAll("[aria-invalid]")) input.removeAttribute("aria-invalid");
}

/** Shows an error next to its field. Returns false if the form has no such field. */
function showRefusal(error) {
  const name = (error.field ?? "")
    .split(".")
    .map((part) => FORM_FIELDS[part] ?? part)
    .find((part) => document.getElementById(`wrong-${part}`));
  if (!name) return false;
  mark(name, error.message);
  return true;
}

function mark(name, message) {
  document.getElementById(`field-${name}`).setAttribute("aria-invalid", "true");
  document.getElementById(`wrong-${name}`).textContent = message;
}

/** Marks invalid fields before anything is sent. Returns whether all fields are valid. */
function isComplete(values) {
  const wrong = {
    model: values.model ? "" : "Choose a model.",
    file: values.file ? "" : "Choose a file, or upload one.",
    epochs: whole(values.epochs) || !values.epochs ? "" : "A whole number above zero.",
    rate:
      !values.rate || listed(values.rate).every((each) => Number(each) > 0)
        ? ""
        : "Numbers above zero, such as 5e-5, separated by commas.",
    target:
      values.batch !== "target" || listed(values.target).every(whole) ? "" : "Whole numbers above zero, separated by commas.",
    validation:
      !values.validation || (Number(values.validation) > 0 && Number(values.validation) < 1)
        ? ""
        : "A share between 0 and 1, such as 0.1.",
    count: whole(values.count) ? "" : "A whole number above zero.",
  };
  for (const [name, message] of Object.entries(wrong)) if (message) mark(name, message);
  return !Object.values(wrong).some(Boolean);
}

const SOURCES = {
  formula: "by formula",
  simulated: "by simulating this training step",
  measured: "from measurements of this training step",
};

function verdict(answer) {
  const [steps, size] = [answer.accumulation_steps, number(answer.actual_batch_size_per_gpu)];
  if (!answer.fits) return "It does not fit";
  const split = steps === 1 ? `one micro-batch of ${size}` : `${number(steps)} micro-batches of at most ${size}`;
  return `It fits: ${split}${answer.devices.length > 1 ? " on each device" : ""}`;
}

function showAnswer(result, answer, values, apply, speed) {
  const limit = Math.min(...answer.devices.map((device) => device.memory_limit_bytes));
  const memory = answer.memory;
  const error = answer.expected_error === null ? "" : `; the mean error so far is ${percent(answer.expected_error)}`;
  fill(
    result,
    h("p", { class: `verdict ${answer.fits ? "is-ok" : "is-bad"}` }, verdict(answer)),
    h("p", {}, answer.explanation),
    memoryBar(memory, limit),
    h(
      "dl",
      { class: "facts" },
      fact("Parameters", `${answer.parameters_are_estimated ? "about " : ""}${number(answer.parameters)}`),
      fact("Peak memory", bytes(memory.peak_process_bytes)),
      fact("Memory limit", bytes(limit)),
      fact("Largest micro-batch that fits", `${number(answer.max_micro_batch_size)} samples`),
    ),
    h("p", { class: "muted", id: "source" }, `Predicted ${SOURCES[answer.source]}${error}.`),
    answer.warnings.map((warning) => h("p", { class: "is-warn" }, warning)),
    h("h2", {}, "Alternatives"),
    table(
      "Alternative settings and their predicted memory",
      [
        { title: "Change" },
        { title: "Fits" },
        { title: "Split", number: true },
        { title: "Memory", number: true },
        { title: "Samples/s", number: true },
        { title: "" },
      ],
      answer.alternatives.map((other) => [
        h("code", {}, other.change),
        h("span", { class: other.fits ? "is-ok" : "is-bad" }, other.fits ? "yes" : "no"),
        `${number(other.accumulation_steps)} × ${number(other.micro_batch_size)}`,
        `${other.source === "formula" && answer.source !== "formula" ? "about " : ""}${bytes(other.peak_process_bytes)}`,
        number(other.predicted_samples_per_second),
        applyButton(other, values, apply),
      ]),
    ),
  );
  showSpeed(answer, limit, speed);
}

/** The form values for a change that the service suggests; null if the form has no field for it. */
const FORM_CHANGES = {
  micro_batch_size: (value, other) => ({ batch: "split", micro: value, steps: String(other.accumulation_steps) }),
  gradient_checkpointing: (value) => ({ checkpointing: value }),
  method: (value) => ({ method: value }),
  optimizer: (value) => ({ optimizer: value }),
  max_length: (value) => ({ length: value }),
  mixed_precision: (value) => ({ precision: value }),
  num_gpus: (value, _other, values) => (values.gpus ? { count: value } : null),
};

/** A button for a change such as `method: lora, gradient_checkpointing: true`. */
function applyButton(other, values, apply) {
  const changes = other.change
    .split(", ")
    .map((each) => each.split(": "))
    .map(([name, value]) => FORM_CHANGES[name]?.(value?.replaceAll('"', ""), other, values));
  if (!changes.every(Boolean)) return "";
  return h(
    "button",
    {
      type: "button",
      class: "quiet",
      "aria-label": `Apply ${other.change}`,
      onclick: () => apply(Object.assign({}, ...changes)),
    },
    "Apply",
  );
}

function showSpeed(answer, limit, speed) {
  const alternatives = [
    { ...answer, change: "as planned", peak_process_bytes: answer.memory.peak_process_bytes },
    ...answer.alternatives,
  ].filter((way) => way.predicted_samples_per_second !== null);
  document.getElementById("speed").hidden = alternatives.length < 2;
  if (alternatives.length < 2) return;
  const points = {
    x: alternatives.map((way) => way.predicted_samples_per_second),
    y: alternatives.map((way) => way.peak_process_bytes / 2 ** 30),
    text: alternatives.map((way) => way.change),
    mode: "markers",
    name: "",
    hover: "%{text}: %{y:.2f} GiB, %{x:.3g}/s<extra></extra>",
  };
  const own = {
    x: [points.x[0]],
    y: [points.y[0]],
    text: ["as planned"],
    mode: "markers+text",
    name: "",
    colour: "second",
    hover: points.hover,
  };
  speed.draw([points, own], {
    summary: `${alternatives.length} settings, the plan included; the one that needs least memory takes ${bytes(Math.min(...alternatives.map((way) => way.peak_process_bytes)))}.`,
    shapes: [horizontalLine(limit / 2 ** 30, "bad")],
  });
}

const fact = (name, value) => h("div", {}, h("dt", {}, name), h("dd", {}, value));

/** A bar that shows the parts of peak memory, relative to the memory limit. */
function memoryBar(memory, limit) {
  const parts = PARTS.map((name) => [name, memory[`${name}_bytes`]]);
  const rest = memory.peak_process_bytes - parts.reduce((sum, [, size]) => sum + size, 0);
  if (rest > 0) parts.push(["allocator", rest]);
  const scale = Math.max(limit, memory.peak_process_bytes) * 1.02;
  const present = parts.filter(([, size]) => size > 0);
  const description = present.map(([name, size]) => `${name} ${bytes(size)}`).join(", ");
  return h(
    "div",
    {},
    h(
      "div",
      { class: "bar", role: "img", "aria-label": `Peak memory: ${description}; limit ${bytes(limit)}` },
      present.map(([name, size]) =>
        sized(h("span", { class: `part-${name}`, title: `${name}: ${bytes(size)}` }), "width", (100 * size) / scale),
      ),
      sized(h("span", { class: "limit", title: `limit: ${bytes(limit)}` }), "left", (100 * limit) / scale),
    ),
    h(
      "ul",
      { class: "legend" },
      present.map(([name, size]) => h("li", {}, h("i", { class: `part-${name}` }), `${name} ${bytes(size)}`)),
      h("li", {}, h("i", { class: "part-limit" }), `limit ${bytes(limit)}`),
    ),
  );
}

function sized(element, side, share) {
  element.style[side] = `${share}%`;
  return element;
}

async function fillModels(form, signal) {
  const [base, all] = await Promise.all([get(`${ROOT}/models`, signal), get("v1/models", signal)]);
  fill(
    form.querySelector("#models"),
    all.data.filter((model) => model.job).map((model) => h("option", { value: model.id }, `trained from ${model.parent}`)),
    base.data.map((model) => h("option", { value: model.id }, `${number(model.parameters)} parameters`)),
  );
}

/** The list of uploaded files, and a field that uploads another one. */
function fileChoice(chooser) {
  const errorElement = h("small", { id: "wrong-upload", class: "wrong", role: "alert" });
  let newest = 0;
  async function load(signal, chosen) {
    const turn = ++newest;
    const { data } = await get("v1/files?limit=100", signal);
    if (turn !== newest) return; // a later list has the file that was uploaded meanwhile
    const own = data.filter((file) => file.purpose === "fine-tune");
    const day = (file) =>
      new Date(file.created_at * 1000).toLocaleString([], { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit" });
    fill(
      chooser,
      h("option", { value: "" }, own.length ? "choose a file" : "upload a file first"),
      own.map((file) =>
        h(
          "option",
          { value: file.id, selected: file.id === chosen, "data-format": file.format ?? "" },
          `${file.filename} (${bytes(file.bytes)}, ${day(file)})`,
        ),
      ),
    );
  }
  const tell = () => chooser.dispatchEvent(new Event("input", { bubbles: true }));
  let uploading = null;
  function uploadChosen(event) {
    const [file] = event.target.files;
    if (!file) return;
    const own = uploadFile(file).finally(() => {
      if (uploading === own) uploading = null;
    });
    uploading = own;
  }
  async function uploadFile(file) {
    errorElement.textContent = "";
    try {
      const stored = await upload(file, columnsOf(columns.value));
      await load(undefined, stored.id);
      announce(`${file.name} is uploaded.`);
      tell();
    } catch (error) {
      chooser.value = "";
      tell();
      errorElement.textContent = `${file.name} was not uploaded. ${error.message}`;
    }
  }
  const columns = h("input", {
    type: "text",
    id: "field-columns",
    autocomplete: "off",
    spellcheck: "false",
    placeholder: "prompt=question, completion=answer",
  });
  const picker = h("input", {
    type: "file",
    id: "field-upload",
    accept: ".jsonl,.ndjson,.json,.csv,.tsv,.parquet,.txt,.md",
    onchange: uploadChosen,
  });
  return {
    load,
    /** Resolves when the file that is being uploaded is there, or was refused; null if there is none. */
    uploading: () => uploading,
    upload: h(
      "div",
      { class: "field" },
      h("label", { for: "field-upload" }, "Upload JSON lines, JSON, CSV, Parquet or text"),
      picker,
      errorElement,
      h("label", { for: "field-columns" }, "Column mapping, if the file's columns have other names (fill in before uploading)"),
      columns,
    ),
  };
}

/** `{prompt: "question"}` for "prompt=question"; null if nothing is entered. */
function columnsOf(text) {
  const pairs = text.split(",").map((pair) => pair.split("=").map((part) => part.trim()));
  return text.trim() ? Object.fromEntries(pairs) : null;
}

/** Plans that this browser stores by name. */
function savedPlans(current, load) {
  const read = () => JSON.parse(localStorage.getItem(SAVED) ?? "{}");
  const write = (plans) => localStorage.setItem(SAVED, JSON.stringify(plans));
  const list = h("ul", { class: "legend" });
  const name = h("input", { type: "text", id: "plan-name", autocomplete: "off" });
  function showAll() {
    fill(
      list,
      Object.entries(read()).map(([own, values]) =>
        h(
          "li",
          {},
          h("button", { type: "button", class: "quiet", onclick: () => load(values) }, own),
          " ",
          h(
            "button",
            {
              type: "button",
              class: "quiet",
              "aria-label": `Forget ${own}`,
              onclick: () => {
                const rest = read();
                delete rest[own];
                write(rest);
                showAll();
              },
            },
            "×",
          ),
        ),
      ),
    );
  }
  function save(event) {
    event.preventDefault();
    if (!name.value.trim()) return;
    write({ ...read(), [name.value.trim()]: current() });
    name.value = "";
    showAll();
  }
  showAll();
  return h(
    "section",
    { class: "panel", "aria-label": "Saved plans" },
    h("h2", {}, "Saved plans"),
    list,
    h(
      "form",
      { onsubmit: save },
      h("div", { class: "field" }, h("label", { for: "plan-name" }, "Save this plan as"), name),
      h("p", { class: "actions" }, h("button", {}, "Save")),
    ),
  );
}
