// How the page of `diff` stands, and what it names.

const LEVELS = 14;
const PROFILE = 42; // height of the bars above the heat map
const COMPARED = new Set(["equal", "changed", "retyped"]);
const FEWEST_DECADES = 4; // of a scale without ends of its own, so that small differences look small
/** Of each: its name, its value, the value as text, and the ends of its logarithmic scale, if these are fixed. */
const MEASURES = {
  relative: ["relative change", (n) => n.relative, (v) => number(v), [1e-6, 1]],
  rms: ["root mean square of the change", (n) => n.rms, (v) => number(v), null],
  max: ["largest change", (n) => n.max, (v) => number(v), null],
  share: ["share of changed elements", (n) => (n.elements ? n.changed / n.elements : null), (v) => percent(v), [1e-4, 1]],
};
const chosen = { state: null, picked: null };
const HISTOGRAMS = {
  title: "Histograms of the size of changes",
  nothing: "No element of this state changed its value.",
  none: "no changed value",
  beside: (row) => `${percent(row.changed / row.elements)} changed`,
  spoken: (row, peak) => `${percent(row.changed / row.elements)} changed, mostly by ${peak}`,
  rows: (row, peak) => [
    ["changed", `${integer(row.changed)} of ${integer(row.elements)}`],
    ["most often by", peak], ["largest", number(row.max)], ["RMS", number(row.rms)],
  ],
};
