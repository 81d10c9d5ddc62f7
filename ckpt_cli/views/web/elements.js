// Elements. Names are input from strangers: they become text, never markup.

const facts = JSON.parse(document.getElementById("facts").textContent);
const SVG = "http://www.w3.org/2000/svg";
const by = (id) => document.getElementById(id);

function made(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== false) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null).map((c) => (typeof c === "number" ? String(c) : c)));
  return node;
}
const el = (tag, attributes = {}, ...children) => made(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) => made(document.createElementNS(SVG, tag), attributes, children);

/** A name for people: what controls or reorders text, or cannot be seen, is spelled out. */
function shown(text) {
  return String(text).replace(/[\p{C}\p{Zl}\p{Zp}]/gu, (c) => `\\u${c.codePointAt(0).toString(16).padStart(4, "0")}`);
}

const short = (text, most) => (text.length <= most ? text : `${text.slice(0, Math.ceil(most / 2) - 1)}\u2026${text.slice(-Math.floor(most / 2))}`);

/** A name in a sentence or a cell: cut in the middle if it is very long; the whole is in its title. */
function named(text, most = 240) {
  const whole = shown(text) || "(no name)";
  return el("bdi", whole.length > most ? { title: whole.slice(0, 4000) } : {}, short(whole, most));
}

function tile(title, big, small, share = null) {
  const bar = share === null ? null : el("span", { class: "bar", "aria-hidden": "true" }, wide(share));
  return el("div", { class: "tile" }, el("dt", {}, title), el("dd", {}, el("div", { class: "big" }, big), el("div", { class: "small" }, small), bar));
}

function wide(share) {
  const bar = el("span");
  bar.style.width = `${100 * clamp(share, 0, 1)}%`;
  if (share === 0) bar.style.minWidth = "0";
  return bar;
}

/** The heads of a table that is not sorted: the first column has names, those in `texts` have text. */
function plainHeads(id, titles, texts = []) {
  by(`${id}-heads`).replaceChildren(...titles.map((title, i) => el("th", { scope: "col", class: i && !texts.includes(i) ? null : "text" }, title)));
}

function verdict(text, command) {
  by("verdict").textContent = text;
  document.title = `${text} \u00b7 ckpt ${command}`;
}
