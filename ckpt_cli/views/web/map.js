// The heat map, and the tensors that are in no layer.

function map() {
  const measure = by("measure").value, cells = cellsOf(chosen.state), scale = scaleOf(cells, measure);
  const [numbered, others] = families(cells);
  by("where-note").textContent = numbered.length
    ? "One cell for each layer and role. Point at a cell for its numbers; choose it to see its tensors in the table."
    : "The names of these tensors number no layers. Point at a tensor for its numbers; choose it to see it in the table.";
  legend(scale, measure, cells);
  by("map").replaceChildren(...numbered.map((family) => familyMap(family, scale, measure, numbered.length > 1)));
  if (others.length) by("map").append(outside(others, scale, measure, numbered.length > 0));
  if (!cells.size) by("map").append(el("p", { class: "note" }, "There are no tensors to compare."));
}

function legend(scale, measure, cells) {
  const text = MEASURES[measure][2], parts = [];
  if (scale) {
    parts.push(el("span", {}, MEASURES[measure][0]));
    const ramp = el("span", { class: "scale", "aria-hidden": "true" }, ...Array.from({ length: LEVELS }, (_, i) => el("i", { class: `l${i}` })));
    parts.push(el("span", {}, text(scale.low), ramp, text(scale.high)));
  }
  parts.push(el("span", {}, el("i", { class: "swatch same" }), "the same bits"));
  if ([...cells.values()].some((cell) => paint(cell, scale, measure) === "odd")) {
    parts.push(el("span", {}, el("i", { class: "swatch odd" }), "NaN or infinite"));
  }
  if (facts.tensors.some((row) => row.state === chosen.state && !COMPARED.has(row.kind))) {
    parts.push(el("span", {}, el("i", { class: "swatch gap" }), "not on both sides, or of another shape"));
  }
  by("legend").replaceChildren(...parts);
}

function familyMap(family, scale, measure, named) {
  const layers = [...family.layers].sort((a, b) => a[1] - b[1]).slice(0, MOST), roles = [...family.roles.keys()];
  const room = by("map").clientWidth || 1000;
  const label = clamp(largest(roles.map((role) => shown(role).length || 8)) * 7 + 14, 96, Math.max(110, room * (room < 500 ? 0.5 : 0.3)));
  const width = clamp((room - label - 2) / layers.length, 2, 96), gap = width >= 9 ? 2 : width >= 5 ? 1 : 0;
  const height = roles.length > 24 ? 20 : 28, bars = profileOf(layers, label, width, gap), top = (bars.length ? PROFILE : 0) + 20;
  const grid = svg("g", { role: "grid", "aria-label": `Heat map of ${shown(family.prefix) || "the layers"}, rows are roles and columns layers` });
  const wide = label + width * layers.length + 2, tall = top + height * roles.length + 4;
  const picture = svg("svg", { width: wide, height: tall, viewBox: `0 0 ${wide} ${tall}` }, hatching(), grid);
  picture.append(...bars, ...layerNumbers(layers, label, width, top - 6));
  const nodes = [];
  roles.forEach((role, y) => {
    const name = shown(role) || "(itself)";
    const row = svg("g", { role: "row" }, svg("text", { role: "rowheader", class: "role", x: label - 9, y: top + y * height + height / 2 + 3, "text-anchor": "end" },
      svg("title", {}, name), short(name, Math.floor((label - 12) / 7))));
    nodes.push(layers.map(([layer], x) => {
      const cell = family.cells.get(keyOf(layer, role));
      if (!cell) return null;
      const node = svg("rect", {
        role: "gridcell", tabindex: -1, "aria-label": spoken(cell), "data-cell": keyOf(layer, role),
        class: `cell ${paint(cell, scale, measure)}${isPicked(keyOf(layer, role)) ? " picked" : ""}`,
        x: label + x * width + gap / 2, y: top + y * height + 1, width: width - gap, height: height - 2, rx: width > 12 ? 4 : width > 7 ? 2 : 0,
        onclick: () => pick(cell), ...tipping(() => tipOf(cell)),
        onkeydown: (event) => walk(event, nodes, y, x, cell),
      });
      row.append(node);
      const text = width >= 42 && height >= 24 ? inCell(cell, scale, measure) : null;
      if (text) row.append(svg("text", { class: `in-cell ${text.tone}`, "aria-hidden": "true", x: label + (x + 0.5) * width, y: top + y * height + height / 2 + 4, "text-anchor": "middle" }, text.value));
      return node;
    }));
    grid.append(row);
  });
  const first = nodes.flat().find(Boolean);
  if (first) first.setAttribute("tabindex", 0);
  return el("div", { class: "family layers" }, named ? el("h3", { class: "mono" }, shown(family.prefix) || "(numbered at the top)") : null,
    el("div", { class: "scroll" }, picture), rest(family.layers.size));
}

/** The number of a cell, short, and whether its ground is light or dark. */
function inCell(cell, scale, measure) {
  if (!cell.numbers || !cell.numbers.changed) return null;
  const value = MEASURES[measure][1](cell.numbers);
  if (!(value > 0)) return { value: "NaN", tone: "plain" };
  const short = measure === "share" ? `${Number((100 * value).toPrecision(2))}%` : value >= 0.01 && value < 1000 ? String(Number(value.toPrecision(2))) : value.toExponential(0).replace("e+", "e");
  return { value: short, tone: levelOf(value, scale) < LEVELS / 2 ? "first-half" : "second-half" };
}

const hatching = () => svg("defs", {}, svg("pattern", { id: "hatching", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
  svg("line", { class: "hatch-line", x1: 0, y1: 0, x2: 0, y2: 6 })));

/** Above the map, each layer's own relative change. */
function profileOf(layers, left, width, gap) {
  const totals = new Map(facts.layers.filter((row) => row.state === chosen.state).map((row) => [row.layer, row.relative || 0]));
  const most = largest(layers.map(([layer]) => totals.get(layer) || 0));
  if (!(most > 0)) return [];
  const bars = layers.map(([layer], x) => {
    const tall = (totals.get(layer) || 0) / most * PROFILE;
    return svg("rect", { class: "profile", x: left + x * width + gap / 2, y: PROFILE - tall, width: width - gap, height: tall, rx: width > 12 ? 2 : 0 });
  });
  return [svg("g", { role: "img", "aria-label": `Relative change of each whole layer; the largest is ${number(most)}` }, ...bars),
    svg("text", { x: left - 9, y: PROFILE - 12, "text-anchor": "end" }, "whole layer,"),
    svg("text", { x: left - 9, y: PROFILE + 2, "text-anchor": "end" }, `to ${number(most)}`)];
}

function layerNumbers(layers, left, width, y) {
  const texts = [];
  let free = -Infinity;
  const every = [1, 2, 5, 10, 20, 25, 50, 100, 200, 500, 1000].find((n) => n * width >= 24) || 5000;
  layers.forEach(([, n], x) => {
    const at = left + (x + 0.5) * width;
    if (n % every === 0 && at > free) {
      texts.push(svg("text", { x: at, y, "text-anchor": "middle", "aria-hidden": "true" }, String(n)));
      free = at + 14 + 6 * String(n).length;
    }
  });
  return texts;
}

/** A page that stands for a hundred thousand things would stand still. */

function outside(cells, scale, measure, beside) {
  const chips = cells.slice(0, MOST).map((cell) => {
    const inside = inCell(cell, scale, measure);
    return el("button", {
      type: "button", class: `chip${isPicked(keyOf(cell.layer, cell.role)) ? " picked" : ""}`, "aria-label": spoken(cell), "data-cell": keyOf(cell.layer, cell.role),
      ...(inside ? { "data-figure": inside.value } : {}), onclick: () => pick(cell), ...tipping(() => tipOf(cell)),
    }, el("i", { class: `swatch ${paint(cell, scale, measure)}` }), el("span", { class: "mono" }, el("bdi", { dir: "ltr" }, shown(fullName(cell)) || "(no name)")));
  });
  return el("div", { id: "outside" }, beside ? el("h3", {}, "Outside the layers") : null, el("div", { id: "chips" }, ...chips), rest(cells.length));
}

/** Of a name without a number, the role is all of it. */
const fullName = (cell) => (/(?:^|\.)\d{1,9}$/.test(cell.layer) ? [cell.layer, cell.role].filter(Boolean).join(".") : cell.role);

function walk(event, nodes, y, x, cell) {
  const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  if (event.key === "Enter" || event.key === " ") { event.preventDefault(); pick(cell); return; }
  if (event.key === "Escape") { hideTip(); return; }
  let to = null;
  if (event.key === "Home") to = nodes[y].find(Boolean);
  else if (event.key === "End") to = nodes[y].findLast(Boolean);
  else if (Object.hasOwn(steps, event.key)) {
    const [down, right] = steps[event.key];
    for (let i = y + down, j = x + right; nodes[i] && j >= 0 && j < nodes[i].length; i += down, j += right) {
      if (nodes[i][j]) { to = nodes[i][j]; break; }
    }
  } else return;
  event.preventDefault();
  if (!to) return;
  event.currentTarget.setAttribute("tabindex", -1);
  to.setAttribute("tabindex", 0);
  to.focus();
}
