// Numbers, for people.

const integer = (n) => n.toLocaleString("en-US");

function number(value) {
  if (value === null || value === undefined) return "\u2013";
  if (value === 0) return "0";
  if (Math.abs(value) >= 1e-3 && Math.abs(value) < 1e5) return String(Number(value.toPrecision(3)));
  return value.toExponential(2).replace("e+", "e");
}

function percent(share) {
  if (share === null) return "\u2013";
  if (share === 0 || share === 1) return `${100 * share} %`;
  const text = (100 * share).toPrecision(3);
  return `${share < 1 && Number(text) === 100 ? "99.9+" : Number(text)} %`;
}

const largest = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);
const smallest = (values) => values.reduce((a, b) => Math.min(a, b), Infinity);
const plural = (n, one, many = `${one}s`) => `${integer(n)} ${n === 1 ? one : many}`;
const labelOf = (state) => (Object.hasOwn(STATES, state) ? STATES[state] : shown(state));
const clamp = (value, least, most) => Math.max(least, Math.min(most, value));
