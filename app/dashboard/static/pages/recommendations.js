/** Recommended values, each with its evidence. */

import { get, query } from "../api.js";
import { fill, h, table } from "../dom.js";
import { number } from "../format.js";
import { field, help, select } from "../terms.js";

export const TITLE = "Recommendations";

const NAMES = [
  "effective_batch_size",
  "micro_batch_size",
  "accumulation_steps",
  "learning_rate",
  "warmup_steps",
  "optimizer",
  "precision",
  "gradient_checkpointing",
  "gradient_clipping",
];

export async function show(main, { chosen, signal }) {
  const model = h("input", {
    type: "text",
    list: "models",
    autocomplete: "off",
    spellcheck: "false",
    value: chosen.get("model_name") ?? "accrue/tiny-gpt2",
  });
  const job = h("input", {
    type: "text",
    autocomplete: "off",
    spellcheck: "false",
    placeholder: "ftjob-…",
    value: chosen.get("training_id") ?? "",
  });
  const batch = h("input", {
    type: "text",
    inputmode: "numeric",
    autocomplete: "off",
    value: chosen.get("target_batch_size") ?? "",
  });
  const optimizer = select(
    [["", "recommended"], "adamw", "adamw_8bit", "lion", "lamb", "lars", "sgd", "adafactor"],
    chosen.get("optimizer") ?? "",
  );
  const method = select([["", "full, or the job's method"], "full", "lora", "qlora"], chosen.get("method") ?? "");
  const samples = h("input", {
    type: "text",
    inputmode: "numeric",
    autocomplete: "off",
    value: chosen.get("dataset_size") ?? "",
  });
  const result = h("div", { "aria-live": "polite" });
  const models = h("datalist", { id: "models" });

  async function recommend() {
    const parameters = {
      training_id: job.value.trim(),
      model_name: job.value.trim() ? "" : model.value.trim(),
      target_batch_size: batch.value.trim(),
      optimizer: optimizer.value,
      method: method.value,
      dataset_size: samples.value.trim(),
    };
    history.replaceState(null, "", `#/recommendations${query(parameters)}`);
    try {
      showAll(result, await get(`gradient-accumulation/performance/recommendations${query(parameters)}`, signal));
    } catch (error) {
      if (!signal.aborted) fill(result, h("p", { class: "is-bad", role: "alert" }, error.message));
    }
  }

  main.append(
    h("h1", {}, "Recommendations"),
    h(
      "section",
      { class: "panel", "aria-label": "What to recommend for" },
      h(
        "form",
        {
          onsubmit: (event) => {
            event.preventDefault();
            recommend();
          },
        },
        h(
          "div",
          { class: "fields" },
          field("model", "Model", model, "model"),
          field("job", "Or a job, to use its measurements", job),
          field("batch", "Effective batch", batch, "effective"),
          field("optimizer", "Optimizer", optimizer, "optimizer"),
          field("method", "Method", method, "method"),
          field("samples", "Number of samples", samples),
        ),
        models,
        h("p", { class: "actions" }, h("button", { class: "primary" }, "Recommend")),
      ),
    ),
    h("section", { class: "panel", "aria-label": "What to choose" }, result),
  );
  const [{ data }] = await Promise.all([get("gradient-accumulation/models", signal), recommend()]);
  fill(
    models,
    data.map((each) => h("option", { value: each.id })),
  );
}

function showAll(result, answer) {
  const what = answer.model_name ?? answer.model_size ?? "this model";
  fill(
    result,
    h("h2", {}, `${what}: ${number(answer.parameters)} parameters`),
    answer.advice.map((sentence) => h("p", {}, sentence)),
    table(
      "Recommended values with their evidence",
      [{ title: "Setting" }, { title: "Value" }, { title: "Why" }, { title: "Evidence" }, { title: "Confidence" }],
      NAMES.map((name) => [
        name.replaceAll("_", " "),
        h("strong", {}, shown(answer[name], name)),
        answer[name].why,
        answer[name].evidence,
        answer[name].confidence,
      ]),
    ),
    h("p", { class: "muted" }, "About evidence ", help("evidence")),
    answer.model_name &&
      h(
        "p",
        { class: "actions" },
        h(
          "a",
          {
            href: `#/plan${query({ model: answer.model_name, target: answer.effective_batch_size.value, rate: answer.learning_rate.value, optimizer: answer.optimizer.value, method: answer.submission.training_config.method })}`,
          },
          "Plan with these values",
        ),
      ),
  );
}

function shown({ value, range }, name) {
  if (name === "precision" && value === "no") return "fp32";
  const own = typeof value === "number" ? number(value) : value === null ? "off" : String(value);
  return range ? `${own} (${range.map(number).join(" to ")})` : own;
}
