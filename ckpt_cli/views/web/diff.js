// How the page of `diff` stands, and what it names.

const LEVELS = 14;
const MOST = 2000; // layers, chips or histograms that are drawn
const PROFILE = 42; // height of the bars above the heat map
const COMPARED = new Set(["equal", "changed", "retyped"]);
const STATES = {
  model: "weights", master: "master weights", exp_avg: "first moments", exp_avg_sq: "second moments",
  momentum_buffer: "momenta", max_exp_avg_sq: "largest second moments",
};
const MEASURES = {
  relative: ["relative change", (n) => n.relative, (v) => number(v)],
  rms: ["root mean square of the change", (n) => n.rms, (v) => number(v)],
  max: ["largest change", (n) => n.max, (v) => number(v)],
  share: ["share of changed elements", (n) => (n.elements ? n.changed / n.elements : null), (v) => percent(v)],
};
const chosen = { state: null, picked: null };
