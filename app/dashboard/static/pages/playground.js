/** Asks a trained model, and the model that it was trained from, the same question, side by side. */

import { ask, ServiceError } from "../api.js";
import { announce, fill, h } from "../dom.js";
import { help } from "../terms.js";

const MOST_TOKENS = 256;

/**
 * @param {Object} job a job whose model exists
 * @param {AbortSignal} signal aborted when the page is left
 */
export function playground(job, signal) {
  const sides = [side("After training", job.id), side("Before training", job.model_name)];
  const message = h("textarea", { id: "message", rows: 3, required: true, maxlength: 100000 });
  const temperature = h("input", { id: "temperature", type: "number", min: 0, max: 2, step: 0.1, value: "0" });
  const asChat = h("input", { id: "as-chat", type: "checkbox", checked: job.dataset.format === "messages" });
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
    await Promise.all(sides.map((each) => each.answer(message.value, Number(temperature.value), asChat.checked, own)));
    asking = null;
    button.textContent = "Ask";
    if (!signal.aborted) announce(own.aborted ? "Stopped." : "Both answers are complete.");
  }

  return h(
    "section",
    { class: "samples", "aria-label": "Try the model" },
    h("h2", {}, "Try the model"),
    h(
      "form",
      { onsubmit: submit },
      h("label", { for: "message" }, "Your message"),
      message,
      h(
        "p",
        { class: "actions" },
        button,
        h("label", { class: "inline" }, asChat, " with the chat template", help("as_chat")),
        h("label", { class: "inline" }, "Temperature ", temperature, help("temperature")),
      ),
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

  async function answer(message, temperature, asChat, signal) {
    fill(text);
    fill(note, "Waiting for the model …");
    const add = (added) => {
      if (added && note.textContent) fill(note);
      text.append(added);
    };
    try {
      await (asChat ? chat : complete)(message, temperature, add, signal);
      if (!text.textContent) fill(note, "The answer is empty: the model ended it at once.");
    } catch (error) {
      if (error instanceof ServiceError && error.code === "no_chat_template" && asChat) {
        await answer(message, temperature, false, signal);
      } else if (signal.aborted) {
        fill(note, "Stopped.");
      } else {
        fill(note, error instanceof ServiceError ? error.message : "The service cannot be reached. Is it running?");
      }
    }
  }

  const chat = (message, temperature, add, signal) =>
    ask(
      "v1/chat/completions",
      { model, messages: [{ role: "user", content: message }], max_tokens: MOST_TOKENS, temperature },
      (chunk) => add(chunk.choices[0]?.delta.content ?? ""),
      signal,
    );
  const complete = (message, temperature, add, signal) =>
    ask(
      "v1/completions",
      { model, prompt: message, max_tokens: MOST_TOKENS, temperature },
      (chunk) => add(chunk.choices[0]?.text ?? ""),
      signal,
    );
  return { element, answer };
}
