// A table that is sorted by its heads, filtered by words and kinds, and shows some rows at a time.

const ROWS = 50;
const PRINTED = 1000;
const order = new Intl.Collator("en", { numeric: true });

/**
 * id        of its parts on the page: `id-heads`, `id-rows`, `id-count`, `id-more`, `id-filter`, `id-kinds`, `id-unselect`
 * noun      what a row is
 * columns   { key, title, value: (row) => a number, a text or null, cell: (row) => nodes, text, up }; the first one has names
 * rows      all rows; `kind(row)` is what the buttons choose; `keep(row)` leaves out others
 * sort      the key of the first order; `words(row)`: what the filter looks in
 * Returns a function that draws anew.
 */
function listing({ id, noun, columns, rows, kind, kinds = [], keep = () => true, sort, words = columns[0].value }) {
  const place = (part) => by(`${id}-${part}`), column = (key) => columns.find((one) => one.key === key);
  const texts = new Map(), ranks = new Map(), pressed = new Set();
  const wordsOf = (row) => { // lower case, once for each row
    if (!texts.has(row)) texts.set(row, String(words(row)).toLowerCase());
    return texts.get(row);
  };
  let shownRows = ROWS, sorting = sort, down = !column(sort).text && !column(sort).up;

  /** Numbers that sort as the values do; of texts they are computed once. */
  function rankOf(key) {
    const { value, text } = column(key);
    if (!text) return value;
    if (!ranks.has(key)) {
      const distinct = [...new Set(rows.map(value))].sort((a, b) => order.compare(a, b));
      const numbers = new Map(distinct.map((one, i) => [one, i]));
      ranks.set(key, (row) => numbers.get(value(row)));
    }
    return ranks.get(key);
  }

  function heads() {
    place("heads").replaceChildren(...columns.map(({ key, title, text }) => {
      const on = sorting === key, arrow = on ? (down ? " \u2193" : " \u2191") : "";
      return el("th", { scope: "col", class: `sorts${text ? " text" : ""}`, "aria-sort": on ? (down ? "descending" : "ascending") : null },
        el("button", { type: "button", "data-sort": key, onclick: () => sortBy(key) }, title, el("span", { "aria-hidden": "true" }, arrow)));
    }));
  }

  function sortBy(key) {
    down = sorting === key ? !down : !column(key).text && !column(key).up;
    sorting = key;
    heads();
    draw(true);
    place("heads").querySelector(`[data-sort="${key}"]`).focus();
  }

  function chosenRows() {
    const parts = place("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = rows.filter((row) => keep(row) && (!pressed.size || pressed.has(kind(row))) && parts.every((part) => wordsOf(row).includes(part)));
    const rank = rankOf(sorting), sign = down ? -1 : 1;
    return found.map((row) => [row, rank(row)]).sort(([, a], [, b]) =>
      a === null || b === null ? (a === null) - (b === null) : sign * (a - b)).map(([row]) => row);
  }

  function draw(anew = false) {
    if (anew) shownRows = ROWS;
    const found = chosenRows(), some = found.slice(0, shownRows), rest = found.length - some.length;
    place("rows").replaceChildren(...some.map((row) => el("tr", {}, ...columns.map(({ value, cell, text }, i) => {
      const content = cell ? cell(row) : shown(value(row));
      const nodes = Array.isArray(content) ? content : [content];
      return i ? el("td", { class: text ? "text" : null }, ...nodes) : el("th", { scope: "row", class: text ? "name" : null }, ...nodes);
    }))));
    place("count").textContent = found.length === rows.length ? `${plural(found.length, noun)}.` : `${integer(found.length)} of ${plural(rows.length, noun)}.`;
    place("more").hidden = !rest;
    place("more").textContent = `Show ${integer(Math.min(shownRows, rest))} more of ${integer(rest)}`;
  }

  function buttons() {
    const counts = new Map();
    for (const row of rows) counts.set(kind(row), (counts.get(kind(row)) || 0) + 1);
    place("kinds").hidden = counts.size < 2;
    place("kinds").replaceChildren(...[...new Set([...kinds, ...counts.keys()])].filter((one) => counts.has(one)).map((one) =>
      el("button", { type: "button", "aria-pressed": "false", onclick: (event) => {
        const on = !pressed.has(one);
        if (on) pressed.add(one); else pressed.delete(one);
        event.currentTarget.setAttribute("aria-pressed", String(on));
        draw(true);
      } }, named(`${one} ${integer(counts.get(one))}`, 80))));
  }

  let before = ROWS;
  addEventListener("beforeprint", () => {
    before = shownRows;
    shownRows = Math.max(shownRows, PRINTED);
    draw();
    if (!place("more").hidden) place("count").textContent += ` The first ${integer(shownRows)} are printed.`;
  });
  addEventListener("afterprint", () => { shownRows = before; draw(); });
  place("filter").addEventListener("input", () => draw(true));
  place("more").addEventListener("click", () => {
    const before = shownRows;
    shownRows *= 2;
    draw();
    const first = place("rows").children[before]; // where reading goes on
    if (first) { first.tabIndex = -1; first.focus({ preventScroll: true }); }
  });
  buttons();
  heads();
  draw();
  return () => draw(true);
}
