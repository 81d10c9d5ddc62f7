// The tree of modules, and its picture: each tensor is a rectangle as large as its bytes.

const DEEPEST = 12; // further parts of a name are not divided
const HUES = 7; // kinds of modules that have a colour of their own

/** Modules by name. A name of a tensor may also be that of a module. */
function treeOf(tensors) {
  const root = { name: "", parent: null, kids: new Map(), tensors: [] };
  for (const tensor of tensors) {
    const parts = tensor.name.split(".");
    const names = parts.length > DEEPEST ? [...parts.slice(0, DEEPEST - 1), parts.slice(DEEPEST - 1).join(".")] : parts;
    let node = root;
    for (const name of names) {
      node.tensors.push(tensor);
      if (!node.kids.has(name)) node.kids.set(name, { name, parent: node, kids: new Map(), tensors: [] });
      node = node.kids.get(name);
    }
    node.tensors.push(tensor);
  }
  return root;
}

/** A module below which there is a choice: one with a single child is shown together with that. */
function branching(node) {
  let label = node.name, end = node;
  while (end.kids.size === 1 && [...end.kids.values()][0].tensors.length === end.tensors.length) {
    [end] = end.kids.values();
    label += `.${end.name}`;
  }
  return { node: end, label };
}

const sizeOf = (node, measure) => node.tensors.reduce((sum, tensor) => sum + tensor[measure], 0);
const partsOf = (node, measure) => [...node.kids.values()].map((kid) => ({ ...branching(kid), size: sizeOf(kid, measure) })).sort((a, b) => b.size - a.size);

/** What a tensor is a part of in its layer, such as `mlp`; of a name without layers, the last module. */
function kindOf(name) {
  const parts = name.split("."), layer = parts.findIndex((part) => /^\d+$/.test(part));
  if (layer >= 0 && layer + 1 < parts.length) return parts[layer + 1];
  return parts[Math.max(0, parts.length - 2)];
}

/** Rectangles that are as square as can be, of sizes that sum up to the area: Bruls, Huizing and van Wijk, 2000. */
function squarified(items, x, y, width, height) {
  const placed = [], total = items.reduce((sum, item) => sum + item.size, 0);
  if (!(total > 0) || width <= 0 || height <= 0) return placed;
  const scale = width * height / total;
  let row = [], filled = 0;
  const worst = (area, low, high, side) => Math.max(side * side * high / (area * area), area * area / (side * side * low));
  const close = () => {
    const side = Math.min(width, height), deep = filled / side;
    let along = 0;
    for (const item of row) {
      const long = item.size * scale / deep;
      placed.push(width >= height ? { ...item, x, y: y + along, width: deep, height: long } : { ...item, x: x + along, y, width: long, height: deep });
      along += long;
    }
    if (width >= height) { x += deep; width -= deep; } else { y += deep; height -= deep; }
    row = [];
    filled = 0;
  };
  let low = 0, high = 0;
  for (const item of items) { // from the largest on
    const area = item.size * scale;
    if (!(area > 0)) break;
    const side = Math.min(width, height);
    if (row.length && worst(filled + area, area, high, side) > worst(filled, low, high, side)) close();
    if (!row.length) high = area;
    low = area;
    row.push(item);
    filled += area;
  }
  if (row.length) close();
  return placed;
}

const isNumber = (name) => /^\d+$/.test(name);

/** The rectangles of a module: of its parts; of layers and of tensors outside them, which are named inside the parts; and
 *  of all tensors, or of modules that are too small for their tensors. */
function leaves(parts, measure, box) {
  const found = [], named = [], open = squarified(parts, ...box).map((one) => ({ ...one, level: 0, inLayer: isNumber(one.label) }));
  const outer = [...open];
  while (open.length) {
    const one = open.pop();
    if (!one.node.kids.size || one.width * one.height < 24) { found.push(one); continue; }
    const gap = one.level < 2 ? 1 : 0.5, head = one.level === 0 && one.width > 64 && one.height > 44 ? 17 : 0;
    const inner = squarified(partsOf(one.node, measure), one.x + gap, one.y + gap + head, one.width - 2 * gap, one.height - 2 * gap - head);
    if (!inner.length) found.push(one);
    for (const part of inner) {
      const isLayer = isNumber(part.label);
      if (!one.inLayer && (isLayer || !part.node.kids.size)) named.push(part);
      open.push({ ...part, level: one.level + 1, inLayer: one.inLayer || isLayer });
    }
  }
  return [outer, named, found];
}

function treemap(node, measure, hues, wide, tall, enter) {
  const parts = partsOf(node, measure), [outer, inner, found] = leaves(parts, measure, [0, 0, wide, tall]);
  const picture = svg("svg", { class: "treemap", width: wide, height: tall, viewBox: `0 0 ${wide} ${tall}`, role: "img", "aria-label": `Treemap of ${plural(parts.length, "part")}; the table below has the same numbers` });
  const paths = new Map();
  const square = (one, trim) => `M${(one.x + trim).toFixed(1)},${(one.y + trim).toFixed(1)}h${Math.max(0.4, one.width - 2 * trim).toFixed(1)}v${Math.max(0.4, one.height - 2 * trim).toFixed(1)}h${-Math.max(0.4, one.width - 2 * trim).toFixed(1)}z`;
  for (const one of found) {
    const hue = hues.get(kindOf(one.node.tensors[0].name)) ?? HUES;
    paths.set(hue, (paths.get(hue) || "") + square(one, one.width > 3 && one.height > 3 ? 0.5 : 0));
  }
  picture.append(svg("path", { class: "ground", d: outer.map((one) => square(one, 0.5)).join("") }));
  for (const [hue, d] of paths) picture.append(svg("path", { class: `c${hue}`, d }));
  for (const one of outer) {
    const letters = Math.floor((one.width - 8) / 7.4), high = one.node.kids.size ? 44 : 20;
    const label = one.label.length > letters ? one.label.replace(/\.weight$/, "") : one.label;
    if (letters >= Math.min(4, label.length) && one.height > high && one.width > 22) picture.append(svg("text", { x: one.x + 5, y: one.y + 13, class: "strong" }, short(shown(label), letters)));
  }
  for (const one of inner) {
    const label = one.label.replace(/\.weight$/, "");
    if (one.width > 8 + 7.4 * label.length && one.height > 18) picture.append(svg("text", { x: one.x + 5, y: one.y + 13, class: "strong" }, shown(label)));
  }
  const within = (one, x, y) => x >= one.x && x < one.x + one.width && y >= one.y && y < one.y + one.height;
  const at = (event) => {
    const box = picture.getBoundingClientRect();
    const x = (event.clientX - box.left) * wide / box.width, y = (event.clientY - box.top) * tall / box.height;
    return [outer.find((one) => within(one, x, y)), found.find((one) => within(one, x, y))];
  };
  const total = sizeOf(node, measure);
  picture.addEventListener("pointermove", (event) => {
    const [, one] = at(event);
    if (!one) { hideTip(); return; }
    const tensor = one.node.tensors[0], single = one.node.tensors.length === 1;
    tip([el("b", {}, short(shown(single ? tensor.name : fullPath(one.node)), 160)), pairs([
      ...(single ? [["shape", shapeText(tensor.shape)], ["type", tensor.dtype]] : [["tensors", integer(one.node.tensors.length)]]),
      [MEASURES[measure][0], MEASURES[measure][1](one.size)], ["share", shareText(one.size, total)],
    ])], event.clientX, event.clientY);
  });
  picture.addEventListener("pointerleave", hideTip);
  picture.addEventListener("click", (event) => {
    const [one] = at(event);
    if (one && one.node.kids.size > 1) enter(one.node);
  });
  return picture;
}

function fullPath(node) {
  const names = [];
  for (let at = node; at.parent; at = at.parent) names.unshift(at.name);
  return names.join(".");
}
