/** Helpers that create and update DOM elements. */

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

/** Replaces an element's content. */
export function fill(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
}

/**
 * A table. Cells are texts or nodes; `number` columns are right-aligned. On a narrow page, CSS stacks the cells of
 * a row, each below its title; the ARIA roles tell screen readers that it is still a table.
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
 * A table that updates in place: rows are matched by key, and a cell is rebuilt only if its content changed, so that
 * a control does not disappear while the user presses it.
 */
export function liveTable(caption, columns, empty) {
  const body = h("tbody", { role: "rowgroup" });
  const emptyMessage = h("p", { class: "muted" }, empty);
  const region = table(caption, columns, [[]], "");
  region.querySelector("tbody").replaceWith(body);
  const rows = new Map();

  /**
   * @param {Array<[string, Array<[string, () => (Node|string|Array)]>]>} content for each row its key, and for each of
   *   its cells a string that the cell depends on and a function that creates its content
   */
  function show(content) {
    emptyMessage.hidden = content.length > 0;
    region.hidden = !content.length;
    for (const [key, row] of rows)
      if (!content.some(([own]) => own === key)) {
        row.element.remove();
        rows.delete(key);
      }
    content.forEach(([key, cells], place) => {
      if (!rows.has(key)) rows.set(key, { element: tableRow(columns.map((column) => cell(column))), rendered: [] });
      const { element, rendered } = rows.get(key);
      if (body.children[place] !== element) body.insertBefore(element, body.children[place] ?? null);
      cells.forEach(([depends, make], at) => {
        if (rendered[at] === depends) return;
        rendered[at] = depends;
        fill(element.children[at], make());
      });
    });
  }
  return { element: h("div", {}, region, emptyMessage), show };
}

/** Makes a screen reader say a text without moving the focus. */
export function announce(text) {
  let region = document.getElementById("announcements");
  if (!region) {
    region = h("p", { id: "announcements", class: "unseen", "aria-live": "polite" });
    document.body.append(region);
  }
  region.textContent = text;
}
