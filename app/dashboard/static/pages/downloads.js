/** A button that downloads a file, shows how much has arrived, and says why it failed. */

import { download, messageOf } from "../api.js";
import { h } from "../dom.js";
import { bytes } from "../format.js";

/**
 * @param {string} label
 * @param {string} path of the file on the service
 * @param {string} name that the downloaded file gets
 */
export function downloadButton(label, path, name, kind = null) {
  const problem = h("small", { class: "is-bad", role: "alert" });
  const button = h("button", { type: "button", class: kind, onclick: start }, label);
  async function start() {
    button.disabled = true;
    problem.textContent = "";
    try {
      await download(path, name, (received) => {
        button.textContent = `${label}: ${bytes(received)}`;
      });
    } catch (error) {
      problem.textContent = messageOf(error);
    } finally {
      button.disabled = false;
      button.textContent = label;
    }
  }
  return [button, problem];
}
