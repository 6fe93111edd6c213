/** Asks a trained model and the model that it was trained from the same question, side by side. */

import { ask, ServiceError } from "../api.js";
import { announce, fill, h } from "../dom.js";

const MOST_TOKENS = 256;

/**
 * @param {Object} job a job whose model exists
 * @param {AbortSignal} signal aborted when the page is left
 */
export function playground(job, signal) {
  const sides = [side("After training", job.id), side("Before training", job.model_name)];
  const message = h("textarea", { id: "message", rows: 3, required: true, maxlength: 100000 });
  const button = h("button", { type: "submit", class: "primary" }, "Ask");
  let asking = null;

  async function submit(event) {
    event.preventDefault();
    if (asking) {
      asking.abort();
      return;
    }
    asking = new AbortController();
    button.textContent = "Stop";
    const own = AbortSignal.any([signal, asking.signal]);
    await Promise.all(sides.map((each) => each.answer(message.value, own)));
    asking = null;
    button.textContent = "Ask";
    if (!signal.aborted) announce("The models have answered.");
  }

  return h(
    "section",
    { "aria-label": "Try the model" },
    h("h2", {}, "Try the model"),
    h(
      "form",
      { onsubmit: submit },
      h("label", { for: "message" }, "Your message"),
      message,
      h("p", { class: "actions" }, button),
    ),
    h(
      "div",
      { class: "answers" },
      sides.map((each) => each.element),
    ),
  );
}

/** One model's answer. */
function side(title, model) {
  const text = h("p", { class: "said" });
  const note = h("p", { class: "muted" });
  const element = h("article", { "aria-label": title }, h("h3", {}, title), h("p", { class: "muted" }, model), text, note);
  let completes = false; // without a chat template, the model completes what is written

  async function answer(message, signal) {
    fill(text);
    fill(note, "Waiting for the model …");
    const add = (added) => {
      if (added && note.textContent) fill(note);
      text.append(added);
    };
    try {
      await (completes ? complete(message, add, signal) : chat(message, add, signal));
      if (!text.textContent) fill(note, "The answer is empty: the model ended it at once.");
    } catch (error) {
      if (error instanceof ServiceError && error.code === "no_chat_template" && !completes) {
        completes = true;
        await answer(message, signal);
      } else if (signal.aborted) {
        fill(note, "Stopped.");
      } else {
        fill(note, error instanceof ServiceError ? error.message : "The service cannot be reached. Is it running?");
      }
    }
  }

  const chat = (message, add, signal) =>
    ask(
      "v1/chat/completions",
      { model, messages: [{ role: "user", content: message }], max_tokens: MOST_TOKENS },
      (chunk) => add(chunk.choices[0]?.delta.content ?? ""),
      signal,
    );
  const complete = (message, add, signal) =>
    ask(
      "v1/completions",
      { model, prompt: message, max_tokens: MOST_TOKENS },
      (chunk) => add(chunk.choices[0]?.text ?? ""),
      signal,
    );
  return { element, answer };
}
