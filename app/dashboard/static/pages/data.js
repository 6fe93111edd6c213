/** A dataset as the trainer will see it: the first samples token by token, and the distribution of lengths. */

import { fill, h, table } from "../dom.js";
import { number, percent } from "../format.js";

/** Puts the service's preview into a panel. */
export function showData(panel, preview) {
  const { lengths } = preview;
  const some = lengths.examples < preview.examples; // of a large file, only some samples are measured
  fill(
    panel,
    h("h2", {}, "The data as the trainer will see it"),
    h("p", { class: "muted" }, h("mark", {}, "Marked"), " text counts toward the loss."),
    preview.samples.map((sample) =>
      h(
        "figure",
        { class: "sample" },
        h(
          "figcaption",
          { class: "muted" },
          `Line ${number(sample.line)}${sample.answer ? ` (${sample.answer})` : ""}: ${number(sample.tokens.length)} tokens, of which ${number(sample.target_tokens)} count toward the loss`,
        ),
        h(
          "p",
          { class: "said" },
          joinRuns(sample).map(([counts, text]) => (counts ? h("mark", {}, text) : text)),
        ),
      ),
    ),
    h(
      "p",
      {},
      `${some ? `Measured ${number(lengths.examples)} of ${number(preview.examples)}` : number(lengths.examples)} samples: ${number(lengths.shortest)} to ${number(lengths.longest)} tokens, ${number(Math.round(lengths.mean))} on average; ${percent(lengths.target_share)} of the tokens count toward the loss.`,
    ),
    lengths.over_max_length > 0 &&
      h(
        "p",
        { class: "is-warn" },
        `${number(lengths.over_max_length)} ${some ? "of them" : "samples"} are longer than ${number(preview.max_length)} tokens.`,
      ),
    lengths.without_targets > 0 &&
      h(
        "p",
        { class: "is-warn" },
        `${number(lengths.without_targets)} ${some ? "of them" : "samples"} have no token that counts toward the loss within the first ${number(preview.max_length)} tokens.`,
      ),
    lengths.equal_answers > 0 &&
      h(
        "p",
        { class: "is-warn" },
        `${number(lengths.equal_answers)} ${some ? "of them" : "samples"} have the same chosen and rejected answer within the first ${number(preview.max_length)} tokens.`,
      ),
    lengths.without_tool_calls > 0 &&
      h(
        "p",
        { class: "is-warn" },
        `${number(lengths.without_tool_calls)} chats lose their tool calls, because the model's chat template does not render them.`,
      ),
    lengths.unused_keys.length > 0 && h("p", {}, `Keys that are not used: ${lengths.unused_keys.join(", ")}.`),
    histogram(lengths.histogram),
  );
}

/** Joins neighbouring tokens that all count, or all do not count, into one text. */
function joinRuns({ tokens, counts }) {
  const found = [];
  tokens.forEach((text, place) => {
    if (found.length && found.at(-1)[0] === counts[place]) found.at(-1)[1] += text;
    else found.push([counts[place], text]);
  });
  return found;
}

function histogram(bins) {
  const most = Math.max(...bins.map((bin) => bin.examples));
  return table(
    "Lengths of the samples",
    [{ title: "Tokens" }, { title: "Samples", number: true }, { title: "" }],
    bins.map((bin) => [`${number(bin.at_least)} to ${number(bin.below - 1)}`, number(bin.examples), share(bin.examples / most)]),
  );
}

function share(part) {
  const bar = h("span", { class: "share", "aria-hidden": "true" });
  bar.style.width = `${(8 * part).toFixed(2)}rem`;
  return bar;
}
