// Cells of the heat map: a layer and a role, of one state.

const keyOf = (layer, role) => JSON.stringify([layer, role]);

function cellsOf(state) {
  const cells = new Map();
  for (const numbers of facts.cells) {
    if (numbers.state === state) cells.set(keyOf(numbers.layer, numbers.role), { layer: numbers.layer, role: numbers.role, numbers, apart: [] });
  }
  for (const row of facts.tensors) {
    if (row.state !== state || COMPARED.has(row.kind)) continue;
    const key = keyOf(row.layer, row.role);
    if (!cells.has(key)) cells.set(key, { layer: row.layer, role: row.role, numbers: null, apart: [] });
    cells.get(key).apart.push(row);
  }
  return cells;
}

/** Cells of numbered layers by what comes before the number; the others apart. */
function families(cells) {
  const numbered = new Map(), others = [];
  for (const cell of cells.values()) {
    const found = /^(?:([^]*)\.)?(\d{1,9})$/.exec(cell.layer);
    if (!found) { others.push(cell); continue; }
    const prefix = found[1] || "";
    if (!numbered.has(prefix)) numbered.set(prefix, { prefix, layers: new Map(), roles: new Map(), cells: new Map() });
    const family = numbered.get(prefix);
    family.layers.set(cell.layer, Number(found[2]));
    family.roles.set(cell.role, true);
    family.cells.set(keyOf(cell.layer, cell.role), cell);
  }
  return [[...numbered.values()], others];
}

function scaleOf(cells, measure) {
  const values = [], fixed = MEASURES[measure][3];
  for (const cell of cells.values()) {
    const value = cell.numbers && cell.numbers.changed ? MEASURES[measure][1](cell.numbers) : null;
    if (value > 0) values.push(value);
  }
  if (!values.length) return null;
  const high = largest(values), low = Math.max(smallest(values), high * 1e-8); // what is further below is not told apart
  return fixed ? { low: fixed[0], high: fixed[1] } : { low: Math.min(low, high / 10 ** FEWEST_DECADES), high };
}

const levelOf = (value, { low, high }) => Math.round(clamp(Math.log(value / low) / Math.log(high / low), 0, 1) * (LEVELS - 1));

function paint(cell, scale, measure) {
  if (!cell.numbers) return "gap";
  if (!cell.numbers.changed) return "same";
  const value = MEASURES[measure][1](cell.numbers);
  return value > 0 ? `l${levelOf(value, scale)}` : "odd";
}

function spoken(cell) {
  const place = `${shown(cell.layer)}, ${shown(cell.role) || "itself"}`;
  if (!cell.numbers) return `${place}: ${cell.apart.map((row) => `${row.kind}, ${row.what}`).join("; ")}`;
  if (!cell.numbers.changed) return `${place}: the same bits`;
  const [name, value, text] = MEASURES[by("measure").value];
  return `${place}: ${name} ${text(value(cell.numbers))}`;
}

function pick(cell) {
  const same = chosen.picked && cell && keyOf(chosen.picked.layer, chosen.picked.role) === keyOf(cell.layer, cell.role);
  chosen.picked = same ? null : cell;
  for (const node of document.querySelectorAll("[data-cell]")) node.classList.toggle("picked", isPicked(node.dataset.cell));
  table();
}

const isPicked = (key) => chosen.picked !== null && key === keyOf(chosen.picked.layer, chosen.picked.role);
