/** Calls the service's public HTTP interface; any other client can make the same calls. */

const KEY = "accrue.key";
const MAX_RETRY_DELAY_MS = 8000;
const MOST_IN_MEMORY = 2 ** 26;

/** An error response of the service, with the service's message. */
export class ServiceError extends Error {
  constructor(status, problem) {
    super(problem?.detail ?? `The service answered with status ${status}.`);
    this.status = status;
    this.code = problem?.error?.code ?? null;
    this.field = problem?.errors?.[0]?.field ?? null;
  }
}

/** What to tell the user about a failed request. */
export function messageOf(error) {
  if (error instanceof ServiceError) return error.message;
  console.warn(error);
  return "The service cannot be reached. Is it running?";
}

export const key = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

const headers = (more = {}) => ({ ...(key.get() ? { Authorization: `Bearer ${key.get()}` } : {}), ...more });

async function request(path, options = {}) {
  let answer;
  try {
    answer = await fetch(path, { ...options, headers: headers(options.headers) });
  } catch (error) {
    if (error.name !== "AbortError") reportConnection(false);
    throw error;
  }
  reportConnection(true);
  if (answer.ok || answer.status === 304) return answer;
  const refused = new ServiceError(answer.status, await answer.json().catch(() => null));
  if (answer.status === 401) document.dispatchEvent(new CustomEvent("key-needed", { detail: key.get() ? refused.message : "" }));
  throw refused;
}

/** Tells the page whether the service can be reached. */
function reportConnection(reachable) {
  document.dispatchEvent(new CustomEvent("connection", { detail: reachable }));
}

export const get = async (path, signal) => (await request(path, { signal })).json();

export const remove = (path) => request(path, { method: "DELETE" });

export async function post(path, body, { signal, idempotencyKey } = {}) {
  const more = {
    ...(body === undefined ? {} : { "Content-Type": "application/json" }),
    ...(idempotencyKey ? { "Idempotency-Key": idempotencyKey } : {}),
  };
  return (
    await request(path, { method: "POST", headers: more, body: body === undefined ? undefined : JSON.stringify(body), signal })
  ).json();
}

/** @param {object | null} columns which column of the file holds which field */
export async function upload(file, columns = null) {
  const form = new FormData();
  form.append("purpose", "fine-tune");
  if (columns) form.append("columns", JSON.stringify(columns));
  form.append("file", file);
  return (await request("v1/files", { method: "POST", body: form })).json();
}

/**
 * Downloads a file. With a key, this page fetches the file itself, because a link cannot send the key.
 *
 * @param {(bytes: number) => void} onProgress gets the number of bytes received so far
 */
export async function download(path, name, onProgress) {
  let url = path;
  if (key.get()) {
    const answer = await request(path);
    const type = answer.headers.get("Content-Type") ?? "";
    let parts = [];
    let received = 0;
    let gathered = 0;
    for await (const part of chunksOf(answer.body)) {
      parts.push(part);
      received += part.length;
      gathered += part.length;
      if (gathered > MOST_IN_MEMORY) {
        parts = [new Blob(parts)]; // the browser may keep it on disk
        gathered = 0;
      }
      onProgress(received);
    }
    url = URL.createObjectURL(new Blob(parts, { type }));
  }
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  if (url !== path) setTimeout(() => URL.revokeObjectURL(url), 60000);
}

/** A query string of the values that are not empty. */
export function query(values) {
  const given = Object.entries(values).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return given.length ? `?${new URLSearchParams(given)}` : "";
}

export function delay(milliseconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, milliseconds);
    signal?.addEventListener(
      "abort",
      () => {
        clearTimeout(timer);
        reject(signal.reason);
      },
      { once: true },
    );
  });
}

/**
 * Calls `look` repeatedly until it returns false. While the service cannot be reached or is busy, retries with growing
 * delays.
 *
 * @param {() => Promise<boolean>} look returns whether to call it again
 */
export async function poll(look, milliseconds, signal) {
  let wait = milliseconds;
  while (!signal.aborted) {
    try {
      if (!(await look())) return;
      wait = milliseconds;
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof ServiceError && error.status < 500 && error.status !== 429) throw error;
      wait = Math.min(MAX_RETRY_DELAY_MS, wait * 2);
    }
    while (document.hidden && !signal.aborted) await delay(500, signal).catch(() => {});
    await delay(wait, signal).catch(() => {});
  }
}

/**
 * Passes every event of a job to `onEvent`: first the past ones, then each new one. After a lost connection, continues
 * with the next event. A hidden page closes its connection: browsers allow six to a service, for all tabs together.
 * EventSource cannot be used, because it cannot send a key.
 *
 * @param {(event: Object) => void} onEvent
 * @param {string} last the last event that is known already
 * @returns {Promise<string>} the last event
 */
export async function follow(jobId, onEvent, signal, last = "") {
  await poll(
    async () => {
      if (document.hidden) return true;
      const connection = new AbortController();
      const whenHidden = () => document.hidden && connection.abort();
      const whenLeft = () => connection.abort();
      document.addEventListener("visibilitychange", whenHidden);
      signal.addEventListener("abort", whenLeft);
      try {
        const more = { Accept: "text/event-stream", ...(last ? { "Last-Event-ID": last } : {}) };
        const options = { headers: more, signal: connection.signal };
        const answer = await request(`gradient-accumulation/training/${jobId}/events`, options);
        if (answer.status === 204) return false;
        for await (const event of parseEvents(answer.body)) {
          if (!event.id) continue; // progress within a window
          last = event.id;
          onEvent(JSON.parse(event.data));
        }
      } catch (error) {
        if (signal.aborted || !connection.signal.aborted) throw error;
      } finally {
        document.removeEventListener("visibilitychange", whenHidden);
        signal.removeEventListener("abort", whenLeft);
      }
      return true; // the job has ended (then the next request gets a 204), or the connection ended
    },
    500,
    signal,
  );
  return last;
}

/**
 * Asks a model. Passes each chunk of the answer to `onChunk`.
 *
 * @param {string} path of chats or completions
 * @param {Object} body without `stream`
 */
export async function ask(path, body, onChunk, signal) {
  const answer = await request(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true }),
    signal,
  });
  for await (const { data } of parseEvents(answer.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServiceError(503, { detail: chunk.error.message, error: chunk.error });
    onChunk(chunk);
  }
}

async function* chunksOf(body) {
  const reader = body.getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    yield value;
  }
}

/** Parses a response body as server-sent events (HTML standard) with data; ignores `retry` and `event`. */
async function* parseEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const lines = block.split("\n");
      const field = (name) =>
        lines
          .filter((line) => line.startsWith(`${name}:`))
          .map((line) => line.slice(name.length + 1).replace(/^ /, ""))
          .join("\n");
      if (field("data")) yield { id: field("id"), data: field("data") };
    }
  }
}
