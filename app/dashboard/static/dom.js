/** Elements made in one expression. */

/**
 * @param {string} tag
 * @param {Object} attributes `on…` are listeners, `class` and the others as in HTML; false and null are left out
 * @param {...(Node|string|number|null|Array)} children
 * @returns {HTMLElement}
 */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Puts new content in the place of the old. */
export function fill(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
}

/**
 * A table; cells are texts or nodes, `number` columns are set to the right. On a narrow page its rows are
 * stacked, each cell below its title; the roles say that it still is a table.
 */
export function table(caption, columns, rows, empty = "Nothing here yet.") {
  if (!rows.length) return h("p", { class: "muted" }, empty);
  return h(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h(
      "table",
      { role: "table" },
      h("caption", {}, caption),
      h(
        "thead",
        { role: "rowgroup" },
        tableRow(
          columns.map((column) =>
            h("th", { role: "columnheader", scope: "col", class: column.number ? "number" : null }, column.title),
          ),
        ),
      ),
      h(
        "tbody",
        { role: "rowgroup" },
        rows.map((row) => tableRow(row.map((content, place) => cell(columns[place], content)))),
      ),
    ),
  );
}

const tableRow = (cells) => h("tr", { role: "row" }, cells);
const cell = (column, content) =>
  h("td", { role: "cell", class: column.number ? "number" : null, "data-title": column.title || null }, content);

/**
 * A table whose rows come and go by their keys; a cell is made anew only where its content changed, so that
 * nothing goes away beneath a finger.
 */
export function liveTable(caption, columns, empty) {
  const body = h("tbody", { role: "rowgroup" });
  const nothing = h("p", { class: "muted" }, empty);
  const region = table(caption, columns, [[]], "");
  region.querySelector("tbody").replaceWith(body);
  const rows = new Map();

  /** @param {Array<[string, Array<[string, () => (Node|string|Array)]>]>} content keys, and for each cell what it depends on and what makes it */
  function show(content) {
    nothing.hidden = content.length > 0;
    region.hidden = !content.length;
    for (const [key, row] of rows)
      if (!content.some(([own]) => own === key)) {
        row.element.remove();
        rows.delete(key);
      }
    content.forEach(([key, cells], place) => {
      if (!rows.has(key)) rows.set(key, { element: tableRow(columns.map((column) => cell(column))), told: [] });
      const { element, told } = rows.get(key);
      if (body.children[place] !== element) body.insertBefore(element, body.children[place] ?? null);
      cells.forEach(([depends, make], at) => {
        if (told[at] === depends) return;
        told[at] = depends;
        fill(element.children[at], make());
      });
    });
  }
  return { element: h("div", {}, region, nothing), show };
}

/** What a screen reader is to say without the focus moving. */
export function announce(text) {
  let region = document.getElementById("announcements");
  if (!region) {
    region = h("p", { id: "announcements", class: "unseen", "aria-live": "polite" });
    document.body.append(region);
  }
  region.textContent = text;
}
