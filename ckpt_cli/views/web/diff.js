// How the page of `diff` stands, and what it names.

const LEVELS = 14;
const MOST = 2000; // layers, chips or histograms that are drawn
const PROFILE = 42; // height of the bars above the heat map
const COMPARED = new Set(["equal", "changed", "retyped"]);
const STATES = {
  model: "weights", master: "master weights", exp_avg: "first moments", exp_avg_sq: "second moments",
  momentum_buffer: "momenta", max_exp_avg_sq: "largest second moments",
};
const FEWEST_DECADES = 4; // of a scale without ends of its own, so that small differences look small
/** Of each: its name, its value, the value as text, and the ends of its logarithmic scale, if these are fixed. */
const MEASURES = {
  relative: ["relative change", (n) => n.relative, (v) => number(v), [1e-6, 1]],
  rms: ["root mean square of the change", (n) => n.rms, (v) => number(v), null],
  max: ["largest change", (n) => n.max, (v) => number(v), null],
  share: ["share of changed elements", (n) => (n.elements ? n.changed / n.elements : null), (v) => percent(v), [1e-4, 1]],
};
const chosen = { state: null, picked: null };
