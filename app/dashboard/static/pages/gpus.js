/** Devices and workers as they are now. */

import { get, poll } from "../api.js";
import { fill, h, table } from "../dom.js";
import { bytes, dateTime, number, percent } from "../format.js";

export const TITLE = "GPUs";

const EVERY = 3000;

export async function show(main, { signal }) {
  const gpus = h("section", { class: "panel", "aria-label": "GPUs" });
  const workers = h("section", { class: "panel", "aria-label": "Workers" });
  main.append(h("h1", {}, "GPUs and workers"), gpus, workers);
  async function refresh() {
    const [seen, workerAnswer] = await Promise.all([
      get("gradient-accumulation/gpus", signal),
      get("gradient-accumulation/workers", signal),
    ]);
    showGpus(gpus, seen);
    showWorkers(workers, workerAnswer.data);
    return true;
  }
  await refresh();
  await poll(refresh, EVERY, signal);
}

function showGpus(section, { gpu_info: seen, declared }) {
  fill(
    section,
    h("h2", {}, "On the service's machine"),
    table(
      "As nvidia-smi shows them",
      [
        { title: "GPU" },
        { title: "Memory" },
        { title: "Used", number: true },
        { title: "Load", number: true },
        { title: "°C", number: true },
        { title: "Used by job" },
      ],
      seen.map((gpu) => [
        `${gpu.gpu_id}: ${gpu.name}`,
        h("meter", {
          min: 0,
          max: gpu.memory_total_bytes,
          value: gpu.memory_used_bytes ?? 0,
          "aria-label": `Memory of GPU ${gpu.gpu_id}`,
        }),
        `${bytes(gpu.memory_used_bytes)} of ${bytes(gpu.memory_total_bytes)}`,
        percent(gpu.load),
        number(gpu.temperature_celsius),
        job(gpu.held_by),
      ]),
      "No GPU was detected. Jobs run on the workers' devices, which may be CPUs.",
    ),
    declared.length
      ? h(
          "p",
          {},
          "Declared for planning: ",
          declared.map((gpu) => `${gpu.gpu_id}: ${gpu.name} (${bytes(gpu.memory_total_bytes)})`).join(", "),
        )
      : null,
  );
}

function showWorkers(section, workers) {
  fill(
    section,
    h("h2", {}, "Workers"),
    table(
      "Newest first",
      [
        { title: "Worker" },
        { title: "State" },
        { title: "Devices" },
        { title: "Labels" },
        { title: "Running" },
        { title: "Last seen" },
      ],
      workers.map((worker) => [
        worker.hostname,
        h("span", { class: worker.alive ? "is-ok" : "muted" }, worker.alive ? "alive" : "silent"),
        worker.devices.map((device) => `${device.name ?? device.id} (${bytes(device.memory_bytes)})`).join(", "),
        Object.entries(worker.labels)
          .map(([name, value]) => `${name}=${value}`)
          .join(", "),
        worker.running.map(job),
        dateTime(worker.last_heartbeat_at),
      ]),
      "No worker has connected yet. Jobs wait until you start one with accrue worker.",
    ),
  );
}

const job = (id) => (id?.startsWith("ftjob-") ? h("a", { href: `#/job/${id}` }, `…${id.slice(-6)}`) : (id ?? "–"));
