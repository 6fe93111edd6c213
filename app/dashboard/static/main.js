/** Shows the page that the URL names after `#/`; the URL also holds the choices made on that page. */

import { key, messageOf, ServiceError } from "./api.js";
import { fill, h } from "./dom.js";
import * as compare from "./pages/compare.js";
import * as gpus from "./pages/gpus.js";
import * as job from "./pages/job.js";
import * as jobs from "./pages/jobs.js";
import * as plan from "./pages/plan.js";
import * as recommendations from "./pages/recommendations.js";
import * as sweep from "./pages/sweep.js";

const PAGES = new Map(Object.entries({ plan, jobs, job, sweep, compare, gpus, recommendations }));
const main = document.getElementById("main");
let pageController = new AbortController();

async function show() {
  pageController.abort();
  pageController = new AbortController();
  const { signal } = pageController;
  const [path, search] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, id] = path.split("/").map(decoded);
  const page = PAGES.get(name) ?? plan;
  for (const link of document.querySelectorAll("nav a")) {
    const target = link.hash.slice(2);
    const here = target === name || (target === "jobs" && ["job", "sweep"].includes(name)) || (target === "plan" && !name);
    if (here) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = name && !PAGES.has(name) ? "No such page · Accrue" : `${page.TITLE} · Accrue`;
  fill(main);
  if (name && !PAGES.has(name)) {
    main.append(
      problem(new ServiceError(404, { detail: `There is no page ${name} here.` }), false),
      h("p", {}, h("a", { href: "#/plan" }, "Plan a job")),
    );
    return;
  }
  try {
    await page.show(main, { id, chosen: new URLSearchParams(search), signal });
  } catch (error) {
    if (!signal.aborted) main.append(problem(error));
  }
}

/** A part of the address without its %-escapes, or as it is if they are invalid. */
function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

function problem(error, again = true) {
  return h(
    "section",
    { class: "panel problem", role: "alert" },
    h("h2", {}, "Something went wrong"),
    h("p", {}, messageOf(error)),
    again && h("p", { class: "actions" }, h("button", { type: "button", onclick: show }, "Try again")),
  );
}

const themes = { light: "Light", dark: "Dark" };

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  const other = theme === "dark" ? "light" : "dark";
  const button = document.getElementById("theme");
  button.textContent = themes[other];
  button.setAttribute("aria-label", `${themes[other]} colours`);
  button.onclick = () => {
    localStorage.setItem("accrue.theme", other);
    setTheme(other);
  };
  document.dispatchEvent(new Event("theme"));
}

const system = matchMedia("(prefers-color-scheme: dark)");
const preferred = () => localStorage.getItem("accrue.theme") ?? (system.matches ? "dark" : "light");
system.addEventListener("change", () => setTheme(preferred()));
setTheme(preferred());

const dialog = document.getElementById("key-dialog");
const typed = document.getElementById("key-value");
const keyError = document.getElementById("key-refused");
function askForKey(why) {
  keyError.textContent = why;
  if (!dialog.open) dialog.showModal();
}
document.getElementById("key").addEventListener("click", () => askForKey(""));
document.addEventListener("key-needed", (event) => askForKey(event.detail));
dialog.addEventListener("close", () => {
  if (!dialog.returnValue) return;
  key.set(dialog.returnValue === "use" ? typed.value.trim() : null);
  typed.value = dialog.returnValue = "";
  show();
});

const connectionBanner = document.getElementById("connection");
let asking = null;
document.addEventListener("connection", ({ detail: reachable }) => {
  connectionBanner.hidden = reachable;
  connectionBanner.textContent = reachable ? "" : "The service does not answer. This page tries again every few seconds.";
  clearInterval(asking);
  if (!reachable) asking = setInterval(askAgain, 3000);
});

/** Hides the banner once the service answers again: not every page makes requests by itself. */
async function askAgain() {
  if (document.hidden) return;
  const answer = await fetch("healthz").catch(() => null);
  if (answer?.ok) document.dispatchEvent(new CustomEvent("connection", { detail: true }));
}

document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the part of the address after # names the page
  main.focus();
});

addEventListener("hashchange", () => {
  show();
  main.focus();
});
show();
