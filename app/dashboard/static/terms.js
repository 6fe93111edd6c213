/** What each term means, and what to choose. */

import { h } from "./dom.js";

const TERMS = {
  model:
    "The model to start from: the built-in one, a folder in ACCRUE_MODELS_DIR, or a model id on the Hugging Face Hub. Start small: settings that work on a small model usually work on a large one.",
  device:
    "Plan for a GPU that this service does not have, such as 24GB or A100-80GB. Leave the field empty to plan for the service's own devices.",
  count: "The number of devices to plan for, and to train on if a worker has as many.",
  method:
    "full trains every weight. lora trains small matrices and freezes the weights: it needs far less memory and is nearly as good for most tasks. qlora also keeps the frozen weights in 4 bits; it needs a GPU.",
  length:
    "Maximum tokens per sample; longer samples are truncated, and plain text is split. Memory grows with this length: choose one that fits nine in ten of your samples.",
  optimizer:
    "adamw stores two numbers per weight; adamw_8bit stores them in 8 bits. adafactor, and sgd without momentum, store almost nothing. Choose adamw unless memory is short.",
  precision: "auto selects bf16 if the GPU supports it, otherwise fp16; on a CPU, it selects fp32.",
  checkpointing:
    "Keeps fewer activations and recomputes them when they are needed: about a third more time, much less memory for long samples.",
  effective:
    "Samples that one optimizer step learns from: micro-batch × accumulation steps × devices. It decides what is learned; how it is split decides only memory and speed. 32 is a good start. Enter several values, separated by commas, to train one job for each (a sweep).",
  micro:
    "Samples that go through the model at once. The largest micro-batch that fits keeps the device busy; the gradients of several micro-batches are added up.",
  steps:
    "Micro-batches whose gradients are added up before the weights change. At a fixed effective batch, more accumulation steps use less memory.",
  objective:
    "sft imitates texts, completions or chats. dpo, orpo and simpo learn from pairs of a chosen and a rejected answer; orpo and simpo need no reference model. kto learns from answers that are labelled as good or bad. reward trains a model that scores answers, from the same pairs; classification trains one that finds the label of a text.",
  epochs: "How many times training goes through the data. 3 is a good start for fine-tuning; watch the loss on held-out samples.",
  rate: "How far each step moves the weights. If the field is empty, full training uses 5e-5 (sft, classification), 1e-6 (dpo, orpo, simpo, kto) or 1e-5 (reward); lora and qlora use, in the same order, 2e-4, 1e-5 or 1e-4. With adamw, doubling the batch allows 1.4 times the rate. Enter several values, separated by commas, to train one job for each (a sweep).",
  validation:
    "A share of the samples that is held out of training: its loss shows whether the model learns or memorises. 0.1 is usual.",
  loss: "The loss of each window (the effective batch of one step): with sft, in nats per token, averaged over all of its tokens; with other objectives, averaged over its samples. It is not a mean of its micro-batches' means. It should fall quickly, then slowly.",
  rewards:
    "beta × log(p / p₀): p is the answer's probability under the trained model, and p₀ under the model that the job started from (orpo, simpo: beta × its mean log-probability per token; reward: the model's score). Chosen answers should rise above rejected ones; if both fall far, lower the learning rate.",
  learning_rate: "The learning rate of each step: first the warmup, then the schedule.",
  grad_norm:
    "The norm of the whole step's gradient before clipping. Spikes often come from unusual samples; steady growth often means that the learning rate is too high.",
  throughput: "Input tokens a second, without padding.",
  memory:
    "At each step, the highest memory so far (on a CPU, of the process; on a GPU, of its tensors), with the plan's prediction. The prediction assumes samples as long as the longest of the data and, on a GPU, includes CUDA's context and what the allocator keeps in reserve, so it is usually higher.",
  prediction:
    "The relative difference between predicted and measured peak memory, at the largest micro-batch that occurred. A positive value means that the job needed less than predicted.",
  as_chat:
    "The message is rendered with the model's chat template, as in training on chats. Otherwise, the model completes the text as it is, as in training on texts, or on prompts and completions.",
  temperature:
    "0 always chooses the most probable token. Higher values choose less probable tokens more often; 1 samples from the model's own distribution.",
  noise_scale:
    "The batch beyond which more samples per step hardly help: estimated from the measured noise of the gradients. If it is well above your batch, a larger batch is worthwhile.",
  certificate:
    "Before the first step, the first window's gradient was computed in two different splits; this is their relative difference. A small value shows that accumulation does not change this model's gradient.",
  export:
    "A copy of the model for other tools: a whole model for vLLM, Ollama or transformers, LoRA's adapters, or a GGUF file. A worker compares it with the trained model on held-out samples (on training samples if none are held out), and an export fails if it predicts other tokens in more than 0.1 % of cases (8 bits: 10 %), not counting near ties, in which the trained model finds both tokens about equally probable. DIR in the commands is the folder into which you unpack the files.",
  evidence:
    "measured: in a run on this service; simulated: by simulating the training step, without a GPU; formula: from the model's sizes; literature: a rule of thumb with its source; requested: your own value.",
  completions:
    "Prompts from held-out samples: the trained model's completion, next to the base model's and the expected text. Those at evaluations show how it got there.",
  own_metrics:
    "A metric that the administrator of this service has added: a program scores completions of held-out prompts that the model makes before training, at each evaluation, and once it is saved.",
  noise: "Variance of the loss around its trend. A batch four times as large has about a quarter of it.",
};

let count = 0;

/** A button that shows what a term means. */
export function help(term) {
  const id = `term-${term}-${count++}`;
  return h(
    "span",
    { class: "help" },
    h("button", { type: "button", class: "what", "aria-label": `What is this?`, popovertarget: id }, "?"),
    h("span", { id, popover: true, class: "meaning", role: "note" }, TERMS[term]),
  );
}

/** A labelled form field with a help button and a place for its error message. */
export function field(name, label, input, term) {
  input.id = `field-${name}`;
  input.name = name;
  input.setAttribute("aria-describedby", `wrong-${name}`);
  return h(
    "div",
    { class: "field" },
    h("span", { class: "label" }, h("label", { for: input.id }, label), term && help(term)),
    input,
    h("small", { id: `wrong-${name}`, class: "wrong" }),
  );
}

export function select(values, chosen) {
  return h(
    "select",
    {},
    values.map((value) => {
      const [optionValue, shown] = Array.isArray(value) ? value : [value, value];
      return h("option", { value: optionValue, selected: optionValue === chosen }, shown);
    }),
  );
}
