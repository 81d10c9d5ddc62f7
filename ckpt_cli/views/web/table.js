// The table of all tensors of `diff`.

const compared = (value) => (row) => (COMPARED.has(row.kind) ? value(row) : null);
const shareOf = (row) => (row.elements ? row.changed / row.elements : null);
const figure = (value, text) => (row) => (COMPARED.has(row.kind) ? text(value(row)) : "");
const scales = new Map();

/** The colours of the table are those of the heat map of relative changes. */
function scaleFor(state) {
  if (!scales.has(state)) scales.set(state, scaleOf(cellsOf(state), "relative"));
  return scales.get(state);
}

function changedCell(row) {
  if (!COMPARED.has(row.kind)) return "";
  return [percent(shareOf(row)), el("span", { class: "bar", "aria-hidden": "true" }, wide(shareOf(row) || 0))];
}

function relativeCell(row) {
  if (!COMPARED.has(row.kind)) return "";
  return [el("i", { class: `swatch ${paint({ numbers: row }, scaleFor(row.state), "relative")}`, "aria-hidden": "true" }), number(row.relative)];
}

const COLUMNS = [
  { key: "name", title: "tensor", text: true, value: (row) => row.name, cell: (row) => [named(row.name), row.what ? el("span", { class: "what" }, named(row.what)) : null] },
  { key: "state", title: "state", text: true, value: (row) => row.state, cell: (row) => labelOf(row.state) },
  { key: "kind", title: "kind", text: true, value: (row) => row.kind, cell: (row) => el("span", { class: `kind ${row.kind}` }, row.kind) },
  { key: "elements", title: "elements", value: compared((row) => row.elements), cell: figure((row) => row.elements, integer) },
  { key: "changed", title: "changed", value: compared(shareOf), cell: changedCell },
  { key: "max", title: "max", value: compared((row) => row.max), cell: figure((row) => row.max, number) },
  { key: "rms", title: "RMS", value: compared((row) => row.rms), cell: figure((row) => row.rms, number) },
  { key: "relative", title: "relative", value: compared((row) => row.relative), cell: relativeCell },
  { key: "cosine", title: "cosine", up: true, value: compared((row) => row.cosine), cell: figure((row) => row.cosine, cosine) },
];

/** Of the picked cell and the chosen state. */
function isListed(row) {
  const state = by("table-state").value, picked = chosen.picked;
  return (!state || row.state === state) && (!picked || (row.layer === picked.layer && row.role === picked.role));
}

let redrawTensors = () => {};

function table() {
  redrawTensors();
  by("tensors-unselect").hidden = !chosen.picked;
  by("tensors-unselect").replaceChildren(...(chosen.picked ? [named(fullName(chosen.picked), 80), " \u00d7"] : []));
  by("tensors-unselect").setAttribute("aria-label", "Show all cells again");
}
