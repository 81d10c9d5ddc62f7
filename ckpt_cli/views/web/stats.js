// The page of `stats`: a head, histograms by state, and a table of all tensors.

const HISTOGRAMS = {
  title: "Histograms of the size of values",
  nothing: "Every finite value of this state is zero.",
  none: "no value on the axis",
  beside: (row) => `norm ${number(row.norm)}`,
  spoken: (row, peak) => `norm ${number(row.norm)}, mostly ${peak}`,
  rows: (row, peak) => [
    ["values", integer(row.values)], ["mostly", peak], ["zero", percent(row.zero / row.values)], ["not finite", integer(strangeOf(row))],
    ["min", number(row.min)], ["max", number(row.max)], ["mean", number(row.mean)], ["norm", number(row.norm)],
  ],
};
const chosen = { state: null };
const strangeOf = (row) => row.nan + row.infinite;
const zerosOf = (row) => (row.values ? row.zero / row.values : null);
const warned = (value) => (row) => (value(row) ? el("strong", { class: "strange" }, integer(value(row))) : "0");

const COLUMNS = [
  { key: "name", title: "tensor", text: true, value: (row) => row.name, cell: (row) => [named(row.name), row.scheme ? el("span", { class: "what" }, named(row.scheme)) : null] },
  { key: "state", title: "state", text: true, value: (row) => row.state, cell: (row) => labelOf(row.state) },
  { key: "dtype", title: "type", text: true, value: (row) => row.dtype },
  { key: "values", title: "values", value: (row) => row.values, cell: (row) => integer(row.values) },
  { key: "nan", title: "NaN", value: (row) => row.nan, cell: warned((row) => row.nan) },
  { key: "infinite", title: "infinite", value: (row) => row.infinite, cell: warned((row) => row.infinite) },
  { key: "zero", title: "zero", value: zerosOf, cell: (row) => percent(zerosOf(row)) },
  { key: "min", title: "min", value: (row) => row.min, cell: (row) => number(row.min) },
  { key: "max", title: "max", value: (row) => row.max, cell: (row) => number(row.max) },
  { key: "mean", title: "mean", value: (row) => row.mean, cell: (row) => number(row.mean) },
  { key: "norm", title: "norm", value: (row) => row.norm, cell: (row) => number(row.norm) },
];

function head() {
  const total = facts.total, strange = strangeOf(total), hit = facts.tensors.filter(strangeOf).length;
  verdict(strange ? `${plural(strange, "value is", "values are")} NaN or infinite` : "Every value is finite", "stats");
  by("verdict").className = strange ? "strange" : "well";
  by("lead").textContent = `${plural(total.values, "value")} in ${plural(facts.tensors.length, "tensor")}`
    + (facts.step === null ? "." : ` of step ${facts.step}.`) + (strange ? ` ${plural(hit, "tensor has", "tensors have")} some that are not finite.` : "");
  by("facts-of").append(el("li", {}, named(facts.path, 400)), ...facts.notices.map((notice) => el("li", { class: "warn" }, named(notice))));
  by("tiles").append(
    tile("NaN", integer(total.nan), total.nan === 1 ? "value" : "values"), tile("infinite", integer(total.infinite), total.infinite === 1 ? "value" : "values"),
    tile("zero", percent(zerosOf(total)), plural(total.zero, "value"), zerosOf(total) || 0),
    ...facts.states.slice(0, 4).map((row) => tile(labelOf(row.state), number(row.norm), `norm; from ${number(row.min)} to ${number(row.max)}`)),
  );
}

head();
stateButtons(histograms);
const redrawTensors = listing({
  id: "tensors", noun: "tensor", columns: COLUMNS, rows: facts.tensors, sort: strangeOf(facts.total) ? (facts.total.nan ? "nan" : "infinite") : "norm",
  keep: (row) => !by("table-state").value || row.state === by("table-state").value, kind: (row) => row.dtype,
});
by("grouping").addEventListener("change", histograms);
by("table-state").addEventListener("change", redrawTensors);
let waiting = 0;
addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(histograms, 120); });
