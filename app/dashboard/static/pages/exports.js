/** Exports a trained model for other tools, and shows how far it agrees with the original. */

import { delay, get, messageOf, post, remove } from "../api.js";
import { announce, fill, h } from "../dom.js";
import { bytes, number, percent } from "../format.js";
import { help, select } from "../terms.js";
import { downloadButton } from "./downloads.js";
import { scoresSequences } from "./jobs.js";

const EVERY = 1000;

/**
 * @param {Object} job a job whose model exists
 * @param {AbortSignal} signal aborted when the page is left
 */
export function exportSection(job, signal) {
  const path = `gradient-accumulation/training/${job.id}/exports`;
  const format = select(
    [
      ["merged", "whole model (safetensors)"],
      ...(job.result.files.includes("adapter_config.json") ? [["adapter", "adapters alone"]] : []),
      ...(scoresSequences(job) ? [] : [["gguf", "GGUF"]]),
    ],
    "merged",
  );
  const type = select([["", "as stored"], "fp32", "bf16", "fp16", ["q8_0", "8 bits (GGUF)"]], "");
  const shown = h("div", { role: "status" });
  const button = h("button", { type: "submit" }, "Export");

  async function submit(event) {
    event.preventDefault();
    button.disabled = true;
    try {
      const body = { format: format.value, type: format.value === "adapter" ? undefined : type.value || undefined };
      let made = await post(path, body, { signal });
      fill(shown, h("p", { class: "muted" }, "A worker makes the export, and compares it with the trained model …"));
      while (["queued", "running"].includes(made.status)) {
        await delay(EVERY, signal);
        made = await get(`${path}/${made.id}`, signal);
      }
      announce(made.status === "succeeded" ? "The export is ready." : "The export failed.");
      fill(shown, made.status === "succeeded" ? ready(made) : h("p", { class: "is-bad" }, made.error));
    } catch (error) {
      if (signal.aborted) return;
      fill(shown, h("p", { class: "is-bad", role: "alert" }, messageOf(error)));
    } finally {
      button.disabled = false;
    }
  }

  function ready(made) {
    const { agreement, near_ties: ties, tokens, samples, held_out: held } = made.verification;
    const commands = [made.commands.vllm, made.commands.ollama].filter(Boolean);
    const failed = h("small", { class: "is-bad", role: "alert" });
    const element = h(
      "div",
      {},
      h(
        "p",
        {},
        `${bytes(made.bytes)}. It predicts the same as the trained model in ${percent(agreement)} of ${number(tokens)} cases, `,
        `on ${number(samples)} ${held ? "held-out" : "training"} samples`,
        ties ? `; ${percent(ties)} more are near ties.` : ".",
      ),
      made.notes.map((note) => h("p", { class: "muted" }, note)),
      commands.map((command) => h("p", {}, h("code", {}, command))),
      h(
        "p",
        { class: "actions" },
        downloadButton("Download the export", made.download, `${made.id}.tar`, "primary"),
        h(
          "button",
          {
            type: "button",
            onclick: async () => {
              try {
                await remove(`${path}/${made.id}`);
                element.remove();
              } catch (error) {
                failed.textContent = messageOf(error);
              }
            },
          },
          "Delete it",
        ),
        failed,
      ),
    );
    return element;
  }

  return h(
    "section",
    { class: "samples", "aria-label": "Export" },
    h("h2", {}, "Export ", help("export")),
    h(
      "form",
      { onsubmit: submit },
      h(
        "p",
        { class: "actions" },
        h("label", { class: "inline" }, "Format ", format),
        h("label", { class: "inline" }, "Weights ", type),
        button,
      ),
    ),
    shown,
  );
}
