// A checkpoint: what it is, what takes space, its states, files, other values and tensors.

const MEASURES = { all: ["all states", bytes], stored: ["stored", bytes], elements: ["elements", integer] };
const ROLES = { parameter: "parameters", frozen: "frozen parameters", buffer: "buffers", extra: "extras" };
const shapeText = (shape) => (shape.length ? shape.map(integer).join(" \u00d7 ") : "scalar");
const shareText = (size, total) => (size > 0 && size < total * 1e-4 ? "< 0.01 %" : percent(total ? size / total : null));
const sum = (rows, key) => rows.reduce((total, row) => total + row[key], 0);

const tensors = facts.tensors.map(([name, form, stored, blocks]) => {
  const { role, weight, states } = facts.forms[form], own = states[weight];
  return {
    name, role, blocks, stored, states, dtype: own.dtype, shape: own.shape,
    elements: own.shape.reduce((a, b) => a * b, 1), all: states.reduce((total, state) => total + state.nbytes, 0),
  };
});
const model = tensors.filter((one) => one.role !== "extra");

function head() {
  const path = facts.path.replace(/\/+$/, ""), name = shown(path.split("/").pop() || path);
  verdict(short(name, 120), "inspect");
  by("lead").replaceChildren(named(path, 400));
  const layout = facts.layout.map(([key, value]) => `${key} ${value}`);
  by("facts-of").append(...[[facts.engine, facts.version].filter(Boolean).join(" "), `format ${facts.format}`, facts.step === null ? "step not stated" : `step ${facts.step}`,
    ...(layout.length ? layout : ["not sharded"])].filter(Boolean).map((one) => el("li", {}, named(one, 120))),
  facts.approximate ? el("li", { class: "warn" }, `${plural(facts.approximate, "state is", "states are")} approximate`) : facts.coded ? el("li", { class: "good" }, "exact") : "");
  const raw = sum(facts.sizes, "raw_nbytes"), stored = sum(facts.sizes, "stored_nbytes"), trained = model.filter((one) => one.role === "parameter" || one.role === "frozen");
  const many = integer(sum(trained, "elements"));
  by("tiles").append(
    tile("parameters", compact(sum(trained, "elements")), `${many} elements in ${plural(trained.length, "tensor")}`),
    tile("all states", bytes(raw), plural(tensors.length && sum(facts.sizes.map((one) => ({ n: 1, ...one })), "n"), "kind of state", "kinds of states")),
    ...(facts.coded ? [tile("stored", bytes(stored), `${Number((raw / Math.max(stored, 1)).toPrecision(3))} times smaller`, stored / Math.max(raw, 1))] : []),
    tile("files", integer(facts.files.length), bytes(sum(facts.files, "nbytes"))),
  );
}

/** A number with its unit of a thousand, a million, and so on. */
function compact(n) {
  const [size, unit] = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]].find(([one]) => n >= one) || [1, ""];
  return `${Number((n / size).toPrecision(3))}${unit && ` ${unit}`}`;
}

// What takes space

const root = treeOf(model), hues = new Map();
let here = branching(root).node, shownParts = 12, drawTree = () => {};

function colours(measure) {
  const sizes = new Map();
  for (const one of model) sizes.set(kindOf(one.name), (sizes.get(kindOf(one.name)) || 0) + one[measure]);
  const largestFirst = [...sizes].sort((a, b) => b[1] - a[1]);
  hues.clear();
  largestFirst.slice(0, HUES).forEach(([name], i) => hues.set(name, i));
  const total = largestFirst.reduce((all, [, size]) => all + size, 0), others = largestFirst.slice(HUES).reduce((all, [, size]) => all + size, 0);
  const entry = (i, name, size) => el("span", {}, el("i", { class: `swatch c${i}`, "aria-hidden": "true" }), el("span", {}, named(name, 40), ` ${shareText(size, total)}`));
  by("legend").replaceChildren(...largestFirst.slice(0, HUES).map(([name, size], i) => entry(i, name, size)), ...(others ? [entry(HUES, "others", others)] : []));
}

function enter(node) {
  here = branching(node).node;
  shownParts = 12;
  space();
  by("path").querySelector("[aria-current]").focus();
}

function space() {
  const measure = by("measure").value, parts = partsOf(here, measure), total = sizeOf(here, measure), steps = [];
  for (let at = here; at; at = at.parent) {
    const node = at;
    if (at === here) steps.unshift(el("span", { "aria-current": "location", tabindex: -1 }, named(at.parent ? at.name : "all", 60)));
    else if (!at.parent || branching(at).node === at) steps.unshift(el("button", { type: "button", onclick: () => enter(node) }, named(at.parent ? at.name : "all", 60)));
    else steps.unshift(el("span", {}, named(at.name, 60)));
  }
  by("path").replaceChildren(el("ol", {}, ...steps.map((step) => el("li", {}, step))));
  colours(measure);
  drawTree();
  plainHeads("modules", ["part", MEASURES[measure][0], "share", ...(measure === "elements" ? [] : ["elements"]), "tensors"]);
  by("modules-rows").replaceChildren(...parts.slice(0, shownParts).map(({ node, label, size }) => el("tr", {},
    el("th", { class: "name", scope: "row" }, node.kids.size > 1 ? el("button", { type: "button", class: "link", onclick: () => enter(node) }, named(label, 120)) : named(label, 120)),
    el("td", {}, MEASURES[measure][1](size)),
    el("td", {}, shareText(size, total), el("span", { class: "bar", "aria-hidden": "true" }, wide(total ? size / total : 0))),
    measure === "elements" ? null : el("td", {}, integer(sizeOf(node, "elements"))), el("td", {}, integer(node.tensors.length)))));
  const rest = parts.length - Math.min(parts.length, shownParts);
  by("modules-more").hidden = !rest;
  by("modules-more").textContent = `Show ${integer(Math.min(rest, 4 * shownParts))} more of ${integer(rest)}`;
}

// States, files, others

function states() {
  const rows = facts.sizes, total = sum(rows, "raw_nbytes");
  by("shares").replaceChildren(...rows.map((row, i) => {
    const part = el("span", { class: `c${Math.min(i, HUES)}` });
    part.style.flexGrow = String(total ? row.raw_nbytes / total : 0);
    return part;
  }));
  const coded = facts.coded;
  plainHeads("sizes", ["state", "bytes", "share", "type", "elements", ...(coded ? ["stored", "bits", "codec"] : [])], [3, 7]);
  by("sizes-rows").replaceChildren(...rows.map((row, i) => el("tr", {},
    el("th", { class: "name", scope: "row" }, el("i", { class: `swatch c${Math.min(i, HUES)}`, "aria-hidden": "true" }), named(row.state, 80)),
    el("td", {}, bytes(row.raw_nbytes)), el("td", {}, shareText(row.raw_nbytes, total)), el("td", { class: "text" }, row.dtype), el("td", {}, integer(row.elements)),
    ...(coded ? [el("td", {}, bytes(row.stored_nbytes)), el("td", {}, row.bits_per_element.toFixed(2)), el("td", { class: "text" }, row.codecs.join(", "))] : []))));
}

/** The share of all parameters that a file has values of: a strip, and the same in words. */
function strip(file) {
  const cells = [...file.columns], runs = [];
  cells.forEach((cell, i) => {
    if (cell === "0") return;
    if (i && cells[i - 1] === "1") runs[runs.length - 1][1] = i + 1; else runs.push([i, i + 1]);
  });
  const said = runs.length ? runs.slice(0, 4).map(([a, b]) => `${Math.round(100 * a / cells.length)} % to ${Math.round(100 * b / cells.length)} %`).join(", ") : "no parameters";
  return svg("svg", { class: "part", width: 144, height: 12, viewBox: "0 0 144 12", role: "img", "aria-label": runs.length > 4 ? `${said} and more` : said },
    svg("rect", { class: "ground", width: 144, height: 12, rx: 3 }), ...runs.map(([a, b]) => svg("rect", { class: "strip", x: a * 144 / cells.length, width: (b - a) * 144 / cells.length, height: 12 })));
}

function files() {
  by("files-note").textContent = "Each file, the rank that wrote it, and which of the parameters it has values of.";
  listing({
    id: "files", noun: "file", rows: facts.files, kind: (row) => row.role, sort: "file",
    columns: [
      { key: "file", title: "file", text: true, value: (row) => row.file, cell: (row) => named(row.file) },
      { key: "rank", title: "rank", text: true, value: (row) => row.rank, cell: (row) => named(row.rank || "\u2013") },
      { key: "role", title: "role", text: true, value: (row) => row.role, cell: (row) => named(row.role, 60) },
      { key: "nbytes", title: "size", value: (row) => row.nbytes, cell: (row) => bytes(row.nbytes) },
      { key: "part", title: "part", text: true, value: (row) => row.columns.split("").map((cell) => 1 - cell).join(""), cell: strip },
    ],
  });
}

function others() {
  const rows = [
    ...facts.notices.map((text) => ["note", text]),
    ...facts.groups.map((one, i) => [`optimizer group ${i}`, `${plural(one.parameters, "parameter")}; ${one.options}`]),
    ...facts.aliases.map(([alias, name]) => [alias, `tied to ${name}`]),
    ...facts.extras,
  ];
  by("others-note").textContent = rows.length ? "Notes, groups of the optimizer with their options, tied parameters, and everything else that was saved." : "Nothing but tensors.";
  by("values").replaceChildren(...rows.map(([name, text]) => el("li", {}, el("span", { class: "mono" }, named(name, 120)), el("span", { class: "mono" }, named(text, 1000)))));
}

head();
by("measure").append(...Object.entries(MEASURES).filter(([name]) => name !== "stored" || facts.coded).map(([name, [text]]) => el("option", { value: name }, text)));
by("measure").addEventListener("change", space);
by("modules-more").addEventListener("click", () => { shownParts *= 5; space(); });
by("space-note").textContent = "Each rectangle is a tensor. Choose a part of the picture, or of the table below it, to look inside.";
for (const [id, rows] of [["space", model], ["kinds", tensors], ["files", facts.files]]) by(id).hidden = !rows.length;
space();
drawTree = fitted(by("treemap"), (width) => treemap(here, by("measure").value, hues, width, width < 600 ? 320 : 380, enter));
states();
files();
others();
listing({
  id: "tensors", noun: "tensor", rows: tensors, sort: "all", kind: (row) => (row.role === "parameter" ? row.dtype : row.role), kinds: [],
  columns: [
    { key: "name", title: "tensor", text: true, value: (row) => row.name, cell: (row) => [named(row.name), row.role === "parameter" ? null : el("span", { class: "what" }, row.role)] },
    { key: "shape", title: "shape", value: (row) => row.elements, cell: (row) => shapeText(row.shape) },
    { key: "dtype", title: "type", text: true, value: (row) => row.dtype },
    { key: "elements", title: "elements", value: (row) => row.elements, cell: (row) => integer(row.elements) },
    { key: "all", title: "all states", value: (row) => row.all, cell: (row) => bytes(row.all) },
    ...(facts.coded ? [{ key: "stored", title: "stored", value: (row) => row.stored, cell: (row) => bytes(row.stored) }] : []),
    { key: "blocks", title: "blocks", value: (row) => row.blocks, cell: (row) => integer(row.blocks) },
    { key: "states", title: "states", text: true, value: (row) => row.states.map((one) => one.state).join(" "), cell: (row) => named(row.states.map((one) => one.state).join(" "), 80) },
  ],
});
