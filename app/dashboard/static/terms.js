/** What each term means, and what to choose. */

import { h } from "./dom.js";

const TERMS = {
  model:
    "The model to start from: built in, a folder of ACCRUE_MODELS_DIR, or the id of one on the hub. Start small: what works on a small one mostly works on a large one.",
  device: "Plan for a GPU that is not here: 24GB, or A100-80GB. Leave it empty to plan for the devices of this service.",
  count:
    "How many of these devices would share a step, for planning: a job trains on one today, and keeps its effective batch by accumulating more.",
  method:
    "full changes every weight. lora trains small matrices beside frozen weights: far less memory, nearly as good for most tasks. qlora keeps the frozen weights in 4 bits, too: needs a GPU.",
  length:
    "Tokens of a sample; longer ones are cut. Memory grows with it: choose a length that nine in ten of your samples fit into.",
  optimizer:
    "adamw keeps two numbers beside each weight; adamw_8bit keeps them in 8 bits. sgd without momentum and adafactor keep next to none. adamw is right unless memory is short.",
  precision: "auto: bf16 where the GPU has it, fp16 where it has not, fp32 on a CPU.",
  checkpointing:
    "Keeps fewer activations and recomputes them when they are needed: about a third more time, much less memory for long samples.",
  effective:
    "Samples that one optimizer step learns from: micro-batch × accumulation steps × devices. It decides what is learned; how it is split decides only memory and speed. 32 is a good start.",
  micro: "Samples that go through the model at once. As many as fit keep the device busy; gradients of several are added up.",
  steps:
    "Micro-batches whose gradients are added up before the weights change. At a fixed effective batch, fewer steps mean larger micro-batches: more memory, not less.",
  epochs: "How many times the data are used. Three are a good start for fine-tuning; watch the loss on held-out samples.",
  rate: "How far each step moves the weights. 5e-5 for all weights, 2e-4 for lora. With adamw, twice the batch allows 1.4 times the rate.",
  validation:
    "A share of the samples that is held out of training: its loss shows whether the model learns or memorises. 0.1 is usual.",
  loss: "Each window's loss in nats per token, averaged over its tokens, not over its micro-batches; the thick line is its moving average. It should fall quickly, then slowly.",
  learning_rate: "The learning rate of each step: first the warm-up, then the schedule.",
  grad_norm:
    "The length of the whole window's gradient before clipping. Spikes are samples that stand out; steady growth means that the learning rate is too high.",
  throughput: "Input tokens a second, without padding.",
  memory:
    "The peak of the training process at each step, next to the plan's prediction, which assumes that every sample has full length, so it may be higher than what was needed.",
  prediction:
    "Predicted over measured peak at the largest micro-batch that actually occurred. Above zero: less was needed than predicted.",
  noise_scale:
    "The batch beyond which more samples per step hardly help: estimated from the measured noise of the gradients. If it is well above your batch, a larger batch is worthwhile.",
  certificate:
    "Before the first step the first window's gradient was made in two different splits; this is the largest relative difference. It shows that accumulating changes nothing for this model.",
  evidence:
    "measured: in a run on this service; simulated: the training step without a GPU; formula: from the model's sizes; literature: a rule of thumb with its source.",
  completions: "Prompts from held-out samples: the trained model's completion, next to the base model's and the expected text.",
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

/** A labelled field with its meaning and a place for what is wrong with it. */
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
      const [own, shown] = Array.isArray(value) ? value : [value, value];
      return h("option", { value: own, selected: own === chosen }, shown);
    }),
  );
}
