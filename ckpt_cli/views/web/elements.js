// Elements. Names are input from strangers: they become text, never markup.

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
