/** Charts by plotly, which is loaded when the first one is drawn. */

import { h } from "./dom.js";

let loading = null;

function plotly() {
  loading ??= new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = "dashboard/plotly.js";
    script.onload = () => resolve(window.Plotly);
    script.onerror = () => {
      loading = null;
      reject(new Error("The chart library did not load."));
    };
    document.head.append(script);
  });
  return loading;
}

/** Starts loading plotly before the first chart is drawn. */
export function preload() {
  plotly().catch(() => {}); // draw() reports the error
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function layout({ x, y, format, shapes }) {
  const axis = { gridcolor: colour("line"), zerolinecolor: colour("line"), automargin: true };
  return {
    height: 220,
    margin: { l: 52, r: 12, t: 8, b: 36 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: colour("text"), family: "inherit", size: 12 },
    showlegend: false,
    hovermode: "x unified",
    hoverlabel: { bgcolor: colour("surface"), font: { color: colour("text") } },
    xaxis: { ...axis, title: { text: x, font: { size: 11 } } },
    yaxis: { ...axis, title: { text: y, font: { size: 11 } }, ...(format ? { tickformat: format } : {}), exponentformat: "e" },
    shapes: shapes ?? [],
    uirevision: "kept", // a zoom survives new points
  };
}

/**
 * Creates a chart; its `draw` replaces all points.
 *
 * @param {string} title
 * @param {{x: string, y: string, format?: string}} axes titles, and d3's format of the values
 * @param {Node|null} meaning a help button
 */
export function chart(title, axes, meaning = null) {
  const plot = h("div", { class: "plot" });
  const summaryElement = h("p", { class: "unseen" });
  const element = h("figure", { class: "chart" }, h("figcaption", {}, title, " ", meaning), plot, summaryElement);
  let drawn = null;
  async function draw(traces, { summary, shapes } = {}) {
    drawn = { traces, shapes };
    summaryElement.textContent = summary ?? "";
    const library = await plotly();
    await library.react(plot, traces.map(styled), layout({ ...axes, shapes }), { displayModeBar: false, responsive: true });
  }
  document.addEventListener("theme", function again() {
    if (!drawn) return;
    if (element.isConnected) draw(drawn.traces, { summary: summaryElement.textContent, shapes: drawn.shapes });
    else document.removeEventListener("theme", again); // the user has left the chart's page
  });
  return { element, draw };
}

/** Converts a trace to plotly's form; colour names become the page's CSS colours. */
function styled(trace) {
  const line = { width: trace.width ?? 2, color: colour(trace.colour ?? "accent"), dash: trace.dash };
  const marker = { color: colour(trace.colour ?? "accent"), size: 9 };
  return {
    type: "scatter",
    mode: trace.mode ?? "lines",
    x: trace.x,
    y: trace.y,
    name: trace.name,
    text: trace.text,
    textposition: "top center",
    line,
    marker,
    hovertemplate: trace.hover ?? "%{y:.4g}<extra>%{fullData.name}</extra>",
  };
}

/** A horizontal line across the whole chart, such as a limit. */
export function horizontalLine(y, name) {
  return { type: "line", xref: "paper", x0: 0, x1: 1, y0: y, y1: y, line: { color: colour(name), width: 1.5, dash: "dot" } };
}

export const PALETTE = ["accent", "second", "third", "fourth", "ok", "bad", "warn"];
