// A run: its checkpoints, how large each one is, and which of them are whole.

const LEFT = 62, RIGHT = 14, TOP = 12, BOTTOM = 44;
const checkpoints = facts.checkpoints.map((one, i) => ({ ...one, number: i + 1, kind: one.whole ? "complete" : "incomplete" }));
const whole = checkpoints.filter((one) => one.whole), newest = checkpoints.find((one) => one.name === facts.newest_whole);
const labelsOf = (one) => [["newest complete", facts.newest_whole], ["latest", facts.latest]].filter(([, name]) => name === one.name).map(([label]) => label);

function head() {
  const path = (facts.path || plural(checkpoints.length, "checkpoint")).replace(/\/+$/, ""), name = shown(path.split("/").pop() || path), broken = checkpoints.length - whole.length;
  verdict(short(name, 120), "inspect");
  by("lead").replaceChildren(named(path, 400));
  const formats = [...new Set(checkpoints.map((one) => one.format).filter(Boolean))];
  by("facts-of").append(...formats.map((one) => el("li", {}, named(`format ${one}`, 120))),
    broken ? el("li", { class: "warn" }, broken === 1 ? "one checkpoint is incomplete" : `${integer(broken)} checkpoints are incomplete`) : "");
  by("tiles").append(
    tile("checkpoints", integer(checkpoints.length), `${integer(whole.length)} complete`, whole.length / Math.max(checkpoints.length, 1)),
    facts.kind === "several" ? "" : tile("newest complete", newest ? stepText(newest) : "\u2013", newest ? shown(newest.name) : "no checkpoint is complete"),
    tile("bytes", bytes(checkpoints.reduce((total, one) => total + (one.nbytes || 0), 0)), "in all that could be opened"),
  );
}

const stepText = (one) => (one.step === null ? "\u2013" : `step ${integer(one.step)}`);

/** One bar for each checkpoint, in the order of the run. */
function chart(wide, tall) {
  const most = Math.max(1, largest(checkpoints.map((one) => one.nbytes || 0))), room = wide - LEFT - RIGHT, each = Math.min(96, room / Math.max(checkpoints.length, 1));
  const up = (nbytes) => tall - BOTTOM - nbytes / most * (tall - TOP - BOTTOM), gap = each > 6 ? Math.min(4, each / 5) : 0;
  const picture = svg("svg", { width: wide, height: tall, viewBox: `0 0 ${wide} ${tall}`, role: "img", "aria-label": `Sizes of ${plural(checkpoints.length, "checkpoint")}; the table below has the same numbers` });
  const grid = svg("g", { class: "axis", "aria-hidden": "true" });
  for (const share of [0, 0.5, 1]) {
    const y = up(share * most);
    grid.append(svg("line", { x1: LEFT, x2: wide - RIGHT, y1: y, y2: y }), svg("text", { x: LEFT - 8, y: y + 4, "text-anchor": "end" }, bytes(share * most)));
  }
  const every = Math.ceil(64 / each);
  checkpoints.forEach((one, i) => {
    if (i % every === 0 && one.step !== null) grid.append(svg("text", { x: LEFT + (i + 0.5) * each, y: tall - BOTTOM + 18, "text-anchor": "middle" }, integer(one.step)));
  });
  grid.append(svg("text", { x: (LEFT + wide - RIGHT) / 2, y: tall - 6, "text-anchor": "middle" }, "step"));
  picture.append(grid);
  checkpoints.forEach((one, i) => {
    const top = one.nbytes === null ? TOP : up(one.nbytes);
    picture.append(svg("rect", {
      class: `bars ${one.whole ? "base" : "broken"}`, x: LEFT + i * each + gap / 2, width: Math.max(each - gap, 0.5), y: top, height: Math.max(tall - BOTTOM - top, 1),
      ...tipping(() => [el("b", {}, shown(one.name)), pairs([["step", one.step === null ? "\u2013" : integer(one.step)], ["size", bytes(one.nbytes)], ["format", one.format || "\u2013"], ["headers", one.kind]])]),
    }));
  });
  return picture;
}

head();
by("sizes-legend").append(el("span", {}, el("i", { class: "swatch base" }), "complete"),
  ...(whole.length < checkpoints.length ? [el("span", {}, el("i", { class: "swatch broken" }), "incomplete; full height if its size is not known")] : []));
by("sizes").hidden = !checkpoints.length;
fitted(by("sizes-chart"), (width) => chart(width, width < 600 ? 220 : 260));
listing({
  id: "checkpoints", noun: "checkpoint", rows: checkpoints, kind: (row) => row.kind, sort: "number", words: (row) => `${row.name} ${row.problem || ""}`,
  columns: [
    { key: "name", title: "checkpoint", text: true, value: (row) => row.name, cell: (row) => [named(row.name), ...labelsOf(row).map((label) => el("span", { class: "what" }, label))] },
    { key: "number", title: "number", value: (row) => row.number, cell: (row) => integer(row.number) },
    { key: "step", title: "step", value: (row) => row.step, cell: (row) => (row.step === null ? "\u2013" : integer(row.step)) },
    { key: "nbytes", title: "size", value: (row) => row.nbytes, cell: (row) => bytes(row.nbytes) },
    { key: "format", title: "format", text: true, value: (row) => row.format || "", cell: (row) => named(row.format || "\u2013", 60) },
    { key: "headers", title: "headers", text: true, value: (row) => row.problem || "", cell: (row) => (row.whole ? "complete" : el("span", { class: "problem" }, named(`incomplete: ${row.problem}`, 400))) },
  ],
});
