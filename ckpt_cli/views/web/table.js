// The table of all tensors.

const COLUMNS = [
  ["name", "tensor", (row) => row.name], ["state", "state", (row) => row.state], ["kind", "kind", (row) => row.kind],
  ["elements", "elements", (row) => row.elements], ["changed", "changed", (row) => (row.elements ? row.changed / row.elements : null)],
  ["max", "max", (row) => row.max], ["rms", "RMS", (row) => row.rms], ["relative", "relative", (row) => row.relative], ["cosine", "cosine", (row) => row.cosine],
];
const TEXTS = new Set(["name", "state", "kind"]);

function heads() {
  by("heads").replaceChildren(...COLUMNS.map(([key, title]) => {
    const sorted = chosen.sort === key;
    return el("th", { scope: "col", class: TEXTS.has(key) ? "text" : null, "aria-sort": sorted ? (chosen.down ? "descending" : "ascending") : null },
      el("button", { type: "button", "data-sort": key, onclick: () => sortBy(key) }, title, el("span", { "aria-hidden": "true" }, sorted ? (chosen.down ? " \u2193" : " \u2191") : "")));
  }));
}

function sortBy(key) {
  chosen.down = chosen.sort === key ? !chosen.down : !TEXTS.has(key) && key !== "cosine";
  chosen.sort = key;
  heads();
  table(true);
  document.querySelector(`[data-sort="${key}"]`).focus();
}

function found() {
  const words = by("filter").value.toLowerCase().split(/\s+/).filter(Boolean), state = by("table-state").value, picked = chosen.picked;
  return facts.tensors.filter((row) =>
    (!state || row.state === state) && (!chosen.kinds.size || chosen.kinds.has(row.kind)) &&
    (!picked || (row.layer === picked.layer && row.role === picked.role)) &&
    words.every((word) => row.name.toLowerCase().includes(word)));
}

function sorted(rows) {
  const value = COLUMNS.find(([key]) => key === chosen.sort)[2], sign = chosen.down ? -1 : 1;
  const lacks = (row) => (!COMPARED.has(row.kind) && !TEXTS.has(chosen.sort)) || value(row) === null;
  return rows.map((row) => [row, lacks(row), value(row)]).sort(([, lackA, a], [, lackB, b]) =>
    lackA || lackB ? lackA - lackB : sign * (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b)).map(([row]) => row);
}

function table(anew = false) {
  if (anew) chosen.shown = STEP;
  const rows = sorted(found()), some = rows.slice(0, chosen.shown);
  by("rows").replaceChildren(...some.map((row) => tableRow(row)));
  by("count").textContent = rows.length === facts.tensors.length ? `${plural(rows.length, "tensor")}.` : `${integer(rows.length)} of ${plural(facts.tensors.length, "tensor")}.`;
  by("more").hidden = some.length === rows.length;
  by("more").textContent = `Show ${integer(Math.min(STEP, rows.length - some.length))} more of ${integer(rows.length - some.length)}`;
  by("unselect").hidden = !chosen.picked;
  if (chosen.picked) by("unselect").textContent = `${shown(fullName(chosen.picked))} \u00d7`;
  by("unselect").setAttribute("aria-label", "Show all cells again");
}

const scales = new Map();

/** The colours of the table are those of the heat map of relative changes. */
function scaleFor(state) {
  if (!scales.has(state)) scales.set(state, scaleOf(cellsOf(state), "relative"));
  return scales.get(state);
}

function tableRow(row) {
  const name = el("td", { class: "name" }, shown(row.name), row.what ? el("span", { class: "what" }, shown(row.what)) : null);
  const kind = el("td", { class: "text" }, el("span", { class: `kind ${row.kind}` }, row.kind));
  const state = el("td", { class: "text" }, labelOf(row.state));
  if (!COMPARED.has(row.kind)) return el("tr", {}, name, state, kind, ...Array.from({ length: 6 }, () => el("td", {}, "")));
  const share = row.elements ? row.changed / row.elements : null;
  const swatch = el("i", { class: `swatch ${paint({ numbers: row }, scaleFor(row.state), "relative")}`, "aria-hidden": "true" });
  return el("tr", {}, name, state, kind, el("td", {}, integer(row.elements)),
    el("td", {}, percent(share), el("span", { class: "bar", "aria-hidden": "true" }, wide(share || 0))),
    el("td", {}, number(row.max)), el("td", {}, number(row.rms)), el("td", {}, swatch, number(row.relative)), el("td", {}, cosine(row.cosine)));
}

function kinds() {
  const counts = new Map();
  for (const row of facts.tensors) counts.set(row.kind, (counts.get(row.kind) || 0) + 1);
  by("kinds").replaceChildren(...["changed", "retyped", "reshaped", "missing", "added", "equal"].filter((kind) => counts.has(kind)).map((kind) =>
    el("button", { type: "button", "aria-pressed": "false", onclick: (event) => {
      const on = !chosen.kinds.has(kind);
      if (on) chosen.kinds.add(kind); else chosen.kinds.delete(kind);
      event.currentTarget.setAttribute("aria-pressed", String(on));
      table(true);
    } }, `${kind} ${integer(counts.get(kind))}`)));
}
