// The head: what was compared, and the sum of it.

function head() {
  const kinds = {};
  for (const row of facts.tensors) kinds[row.kind] = (kinds[row.kind] || 0) + 1;
  const count = (...names) => names.reduce((sum, name) => sum + (kinds[name] || 0), 0);
  const compared = count("equal", "changed", "retyped"), unequal = count("changed", "retyped"), apart = count("missing", "added", "reshaped");
  const total = facts.total, share = total.elements ? total.changed / total.elements : 0;
  if (facts.same) {
    verdict("The same, bit for bit", "diff");
    by("verdict").className = "well";
  } else if (!unequal && !apart) {
    verdict("Every tensor is the same; other things differ", "diff");
  } else {
    verdict(!unequal ? "Not the same tensors" : unequal === compared
      ? (compared === 1 ? "The tensor differs" : `All ${integer(compared)} ${apart ? "compared " : ""}tensors differ`)
      : `${integer(unequal)} of ${integer(compared)} ${apart ? "compared " : ""}tensors differ`, "diff");
  }
  by("lead").textContent = lead(compared, count("missing"), count("added"), count("reshaped"));
  by("sides").append(side(0), el("span", { class: "arrow", "aria-hidden": "true" }, "\u2192"), side(1));
  const tiles = [
    tile("tensors", integer(unequal), `of ${integer(compared)} differ`, compared ? unequal / compared : 0),
    tile("elements", percent(share), `${integer(total.changed)} of ${integer(total.elements)} changed`, share),
  ];
  for (const row of facts.states.slice(0, 4)) {
    if (row.changed && row.relative === null) continue; // a sum with NaN or infinity is none
    const said = row.changed ? `relative change; cosine ${cosine(row.cosine)}` : "every bit is the same";
    tiles.push(tile(labelOf(row.state), number(row.relative), said));
  }
  for (const [kind, what] of [["missing", "in the first only"], ["added", "in the second only"], ["reshaped", "of different shapes"], ["retyped", "of different types"]]) {
    if (kinds[kind]) tiles.push(tile(what, integer(kinds[kind]), kinds[kind] === 1 ? "tensor" : "tensors"));
  }
  if (total.not_finite) tiles.push(tile("not finite", integer(total.not_finite), "elements, of which only the bits are compared"));
  by("tiles").append(...tiles);
}

function lead(compared, missing, added, reshaped) {
  const [a, b] = facts.steps, said = [];
  if (a !== null && b !== null) said.push(a === b ? `Both are of step ${a}.` : `From step ${a} to step ${b}.`);
  said.push(`${plural(compared, "tensor was", "tensors were")} compared`);
  const lacking = [];
  if (missing) lacking.push(`${integer(missing)} more ${missing === 1 ? "is" : "are"} only in the first`);
  if (added) lacking.push(`${integer(added)} more ${added === 1 ? "is" : "are"} only in the second`);
  if (reshaped) lacking.push(`${integer(reshaped)} more ${reshaped === 1 ? "has" : "have"} different shapes`);
  said[said.length - 1] += lacking.length ? `; ${lacking.join(", ")}.` : ".";
  if (facts.values.length) said.push(`${plural(facts.values.length, "other value differs", "other values differ")}.`);
  return said.join(" ");
}

function side(i) {
  const path = [facts.first, facts.second][i].replace(/\/+$/, ""), loss = facts.approximate[i];
  const engine = [facts.engines[i], facts.versions[i]].filter(Boolean).join(" ");
  const tags = [engine, `format ${facts.formats[i]}`, facts.steps[i] === null ? null : `step ${facts.steps[i]}`, facts.layouts[i] || null];
  return el("div", { class: "side" },
    el("div", { class: "which" }, ["first", "second"][i]),
    el("div", { class: "name" }, named(path.split("/").pop() || path)),
    el("div", { class: "path" }, named(path, 400)),
    el("ul", { class: "tags" },
      ...tags.filter(Boolean).map((tag) => el("li", {}, shown(tag))),
      loss ? el("li", { class: "warn" }, `${plural(loss, "state is", "states are")} approximate`) : null));
}

function cosine(value) {
  if (value === null || 1 - value > 1e-4) return value === null ? "\u2013" : value.toFixed(6);
  return 1 - value < 1e-15 ? "1" : `1 \u2212 ${number(1 - value)}`;
}
