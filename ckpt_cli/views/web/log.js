// A chain: size and error by step, segments of its log, and all states; or a family of models by number and name.

const LEFT = 62, RIGHT = 14, TOP = 12, BOTTOM = 40, STRIP = 12;
const members = facts.steps, segments = facts.segments;
const figures = { stored: (one) => one.stored_nbytes, reads: (one) => one.restore.reads_nbytes, ratio: (one) => one.ratio };
const times = (value) => Number(value.toPrecision(3)).toLocaleString("en-US");
const texts = { stored: bytes, reads: bytes, ratio: (value) => `${times(value)}\u00d7` };
const isFamily = members.some((one) => one.name !== undefined), memberNoun = isFamily ? "model" : "state";
const stateLabel = (one) => (isFamily ? `${integer(one.step)}: ${one.name}` : `step ${integer(one.step)}`);
const states = [...new Set(members.flatMap((one) => Object.keys(one.errors)))];
const errorOf = (one, state, key) => {
  const value = Object.hasOwn(one.errors, state) ? one.errors[state][key] : null;
  return typeof value === "number" && value > 0 ? value : null;
};
const largestError = (one, key) => {
  const found = states.map((state) => errorOf(one, state, key)).filter((value) => value !== null);
  return found.length ? largest(found) : null;
};

function head() {
  const name = facts.chain.replace(/\/+$/, "").split("/").pop() || facts.chain, logged = segments.reduce((sum, one) => sum + Math.max(0, (one.last ?? one.first) - one.first), 0);
  verdict(members.length ? `${plural(members.length, memberNoun)} in ${shownTimes(facts.raw_nbytes, facts.stored_nbytes)}` : plural(logged, "logged step"), "log");
  const ends = isFamily ? ["A family of models, each stored in full or as a delta of another one."] : members.length ? [members.length === 1 ? `A state of step ${integer(members[0].step)}.` : `States of steps ${integer(members[0].step)} to ${integer(members[members.length - 1].step)}.`] : [];
  if (segments.length) ends.push(`The log of gradients has ${plural(logged, "step")}${segments.some((one) => one.has_ended === false) ? ", and has not ended" : ""}.`);
  if (!isFamily) ends.push(facts.last === null ? "No step can be restored." : `The last step that can be restored is ${integer(facts.last)}.`);
  const unfinished = facts.unfinished || [];
  if (unfinished.length) ends.push(`${plural(unfinished.length, "state")} ${unfinished.length === 1 ? "is" : "are"} not complete: ${unfinished.map((one) => one.folder).join(", ")}.`);
  by("lead").replaceChildren(named(name, 120), `: ${ends.join(" ")}`);
  const approximate = members.filter((one) => !one.exact).length, lastOne = members[members.length - 1];
  by("tiles").append(
    tile("stored", bytes(facts.stored_nbytes), `of ${bytes(facts.raw_nbytes)}`, facts.stored_nbytes / Math.max(facts.raw_nbytes, 1)),
    ...(members.length ? [tile("bases and deltas", integer(members.filter((one) => one.kind === "base").length), `${plural(members.filter((one) => one.kind !== "base").length, "delta")} after them`)] : []),
    ...(!members.length ? [] : [approximate ? tile("approximate", integer(approximate), `of ${plural(members.length, memberNoun)}; the others are exact`) : tile("values", "exact", `every bit of every ${memberNoun}`)]),
    ...(lastOne ? [tile("to restore the last", bytes(facts.tip ? facts.tip.stored_nbytes : figures.reads(lastOne)), facts.tip ? "to read: it is stored alone, too" : `to read, ${plural(lastOne.restore.deltas, "delta")} to replay`)] : []),
    ...(segments.length ? [tile("gradients", bytes(segments.reduce((sum, one) => sum + (one.stored_nbytes || 0), 0)), plural(segments.length, "segment"))] : []),
  );
}

const shownTimes = (raw, stored) => (raw >= stored ? `${times(raw / Math.max(stored, 1))} times fewer bytes` : `${times(stored / Math.max(raw, 1))} times more bytes`);

// Charts: bars or lines over the steps, with a cursor that the pointer and the arrow keys move.

const firstStep = smallest([...members.map((one) => one.step), ...segments.map((one) => one.first)]);
const lastStep = largest([...members.map((one) => one.step), ...segments.map((one) => one.last ?? one.first)]);

function stepScale(wide) {
  const span = Math.max(lastStep - firstStep, 1), room = wide - LEFT - RIGHT, pad = Math.min(24, room * 0.04);
  return (step) => (firstStep === lastStep ? LEFT + room / 2 : LEFT + pad + (step - firstStep) / span * (room - 2 * pad));
}

function stepAxis(grid, across, wide, tall) {
  const rung = niceStep((lastStep - firstStep) / Math.max(2, (wide - LEFT) / 90), 1);
  for (let step = Math.ceil(firstStep / rung) * rung; step <= lastStep; step += rung) {
    const x = across(step), half = 3.6 * integer(step).length;
    grid.append(svg("text", { x: Math.min(x, wide - half - 1), y: tall - BOTTOM + 20, "text-anchor": "middle" }, integer(step)));
  }
  grid.append(svg("text", { x: (LEFT + wide - RIGHT) / 2, y: tall - 4, "text-anchor": "middle" }, isFamily ? "number of the model" : "step"));
}

/** Values by the column of pixels in which their steps are: more states than columns are drawn as ranges. */
function bucketed(points, across, width) {
  const buckets = new Map();
  for (const [step, value] of points) {
    const x = Math.floor(across(step) / width) * width + width / 2;
    if (!buckets.has(x)) buckets.set(x, []);
    buckets.get(x).push(value);
  }
  return [...buckets];
}

const isDense = members.length > 400;

/** 1, 2 or 5 times a power of ten that is not less. */
function niceStep(least, smallestStep) {
  const power = 10 ** Math.floor(Math.log10(Math.max(least, 1e-300)));
  return Math.max(smallestStep, [1, 2, 5, 10].find((n) => n * power >= least * 0.999) * power);
}

function gridLine(grid, y, wide, text) {
  grid.append(svg("line", { x1: LEFT, x2: wide - RIGHT, y1: y, y2: y }), svg("text", { x: LEFT - 8, y: y + 4, "text-anchor": "end" }, text));
}

/** A cursor on the nearest state, for pointers and for arrow keys, which also says it. */
function cursored(picture, across, wide, tall, rowsOf) {
  const line = svg("line", { class: "cursor", y1: TOP, y2: tall - BOTTOM, visibility: "hidden" });
  let at = -1;
  const show = (i, x, y, speak) => {
    at = clamp(i, 0, members.length - 1);
    const one = members[at], rows = rowsOf(one);
    line.setAttribute("x1", across(one.step));
    line.setAttribute("x2", across(one.step));
    line.setAttribute("visibility", "visible");
    tip([el("b", {}, stateLabel(one)), pairs(rows)], x, y);
    if (speak) by("said").textContent = `${stateLabel(one)}: ${rows.map((row) => row.join(" ")).join(", ")}`;
  };
  const hide = () => { line.setAttribute("visibility", "hidden"); hideTip(); };
  picture.append(line);
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect(), x = (event.clientX - box.left) * wide / box.width;
    let low = 0, high = members.length - 1;
    while (low < high) { const mid = (low + high) >> 1; if (across(members[mid].step) < x) low = mid + 1; else high = mid; }
    if (low && x - across(members[low - 1].step) < across(members[low].step) - x) low -= 1;
    show(low, event.clientX, event.clientY, false);
  });
  picture.addEventListener("pointerleave", hide);
  picture.addEventListener("blur", hide);
  picture.addEventListener("keydown", (event) => {
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: members.length - 1 }[event.key];
    if (event.key === "Escape") hide();
    if (to === undefined) return;
    event.preventDefault();
    const box = picture.getBoundingClientRect(), next = clamp(to, 0, members.length - 1);
    show(next, box.left + across(members[next].step) * box.width / wide, box.top + 20, true);
  });
  return picture;
}

function sizesChart(wide, tall) {
  const measure = by("size").value, value = figures[measure], text = texts[measure];
  const foot = segments.length ? STRIP + 4 : 0, ground = tall - BOTTOM - foot, across = stepScale(wide);
  const most = largest(members.map(value)), unit = measure === "ratio" ? 1 : 1024 ** Math.floor(Math.log(Math.max(most, 1)) / Math.log(1024));
  const rung = niceStep(most / unit / 4, 0) * unit, lines = Math.ceil(most / rung - 1e-9), top = lines * rung;
  const up = (n) => ground - n / top * (ground - TOP);
  const picture = svg("svg", { width: wide, height: tall, viewBox: `0 0 ${wide} ${tall}`, role: "img", tabindex: 0,
    "aria-label": `Bars of ${plural(members.length, "state")}: ${by("size").selectedOptions[0].text}, at most ${text(most)}. Arrow keys read them; the table has the same numbers` });
  const grid = svg("g", { class: "axis" });
  for (let i = 0; i <= lines; i += 1) gridLine(grid, up(i * rung), wide, text(i * rung));
  stepAxis(grid, across, wide, tall);
  picture.append(grid);
  const gaps = members.slice(1).map((one, i) => across(one.step) - across(members[i].step)), dense = isDense;
  const width = dense ? 2 : clamp(0.76 * (gaps.length ? smallest(gaps) : 30), 1, 30);
  for (const kind of ["delta", "base"]) {
    const points = members.filter((one) => (one.kind === "base") === (kind === "base")).map((one) => [one.step, value(one)]);
    const bars = dense ? bucketed(points, across, width).map(([x, values]) => [x, largest(values)]) : points.map(([step, one]) => [across(step), one]);
    const marks = dense && kind === "base"; // bars would hide the deltas
    const d = bars.map(([x, one]) => (marks ? `M${(x - 1.5).toFixed(1)},${(up(one) - 1.5).toFixed(1)}h3v3h-3z`
      : `M${(x - width / 2).toFixed(1)},${ground}v${(-Math.max(1, ground - up(one))).toFixed(1)}h${width.toFixed(1)}V${ground}z`)).join("");
    if (d) picture.append(svg("path", { class: `bars ${kind}`, d }));
  }
  for (const one of segments) {
    if (one.last === null || one.last === undefined) continue;
    const from = across(one.first), wideness = Math.max(2, across(one.last) - from - 1);
    picture.append(svg("rect", { class: "segment", x: from, y: tall - BOTTOM - STRIP, width: wideness, height: STRIP - 3, rx: 2 }));
  }
  return cursored(picture, across, wide, tall, (one) => [["kind", one.kind], ["stored", bytes(one.stored_nbytes)], ["raw", bytes(one.raw_nbytes)], ["times smaller", texts.ratio(one.ratio)],
    ["to restore", `${bytes(one.restore.reads_nbytes)}, ${plural(one.restore.deltas, "delta")}`], ["values", accuracy(one)]]);
}

function errorsChart(wide, tall) {
  const key = by("error").value, across = stepScale(wide), ground = tall - BOTTOM;
  const all = members.flatMap((one) => states.map((state) => errorOf(one, state, key))).filter((value) => value !== null);
  if (!all.length) return el("p", { class: "note" }, "No state has this figure.");
  const bottom = Math.floor(Math.log10(smallest(all))), top = Math.max(bottom + 1, Math.ceil(Math.log10(largest(all))));
  const up = (n) => ground - (Math.log10(n) - bottom) / (top - bottom) * (ground - TOP);
  const picture = svg("svg", { width: wide, height: tall, viewBox: `0 0 ${wide} ${tall}`, role: "img", tabindex: 0,
    "aria-label": `Errors of ${plural(states.length, "kind of state", "kinds of states")}, ${by("error").selectedOptions[0].text}: ${number(smallest(all))} to ${number(largest(all))}. Arrow keys read them; the table has the same numbers` });
  const grid = svg("g", { class: "axis" }), every = Math.max(1, Math.ceil((top - bottom) / 6));
  for (let ten = bottom; ten <= top; ten += every) gridLine(grid, up(10 ** ten), wide, `1e${ten}`);
  stepAxis(grid, across, wide, tall);
  picture.append(grid);
  states.forEach((state, i) => {
    const points = members.map((one) => [one.step, errorOf(one, state, key)]);
    if (isDense) {
      const columns = bucketed(points.filter(([, value]) => value !== null), across, 2);
      const band = columns.map(([x, values]) => `M${x - 1},${up(largest(values)).toFixed(1)}h2V${(up(smallest(values)) + 1).toFixed(1)}h-2z`).join("");
      const mean = columns.map(([x, values], n) => `${n ? "L" : "M"}${x},${up(10 ** (values.reduce((sum, one) => sum + Math.log10(one), 0) / values.length)).toFixed(1)}`).join("");
      picture.append(svg("path", { class: `band e${Math.min(i, 5)}`, d: band }), svg("path", { class: `errors e${Math.min(i, 5)}`, d: mean }));
      return;
    }
    let path = "", dots = "", open = false;
    for (const [step, value] of points) {
      if (value === null) { open = false; continue; }
      const at = `${across(step).toFixed(1)},${up(value).toFixed(1)}`;
      path += `${open ? "L" : "M"}${at}`;
      dots += `M${at}h0.01`;
      open = true;
    }
    picture.append(svg("path", { class: `errors e${Math.min(i, 5)}`, d: path }));
    if (members.length < (wide - LEFT) / 5) picture.append(svg("path", { class: `errors dots e${Math.min(i, 5)}`, d: dots }));
  });
  return cursored(picture, across, wide, tall, (one) => states.map((state) => [shown(state), errorOf(one, state, key) === null ? "exact" : number(errorOf(one, state, key))]));
}

// Tables

function accuracy(one) {
  if (one.exact) return "exact";
  const said = [["rel", "rel"], ["max", "max_abs"]].map(([name, key]) => [name, largestError(one, key)]).filter(([, value]) => value !== null);
  return said.length ? `approximate: ${said.map(([name, value]) => `${name} ${number(value)}`).join(", ")}` : "approximate";
}

function replays(one) {
  if (one.error !== undefined) return one.error ? `cannot be read: ${shown(one.error)}` : "cannot be read";
  if (one.optimizers.some((each) => each.exactness === "approximate")) return "approximate: other rounding";
  if (!one.exact) return `approximate: stored as ${shown(one.codec)}`;
  return one.optimizers.some((each) => each.exactness === "same library") ? "exact by torch on a machine like the run's" : "exact, without torch";
}

function segmentTable() {
  by("segments").hidden = !segments.length;
  by("segments-note").textContent = "Each segment begins at a state, and has the gradients of the steps after it.";
  plainHeads("segments", ["steps", "stored", "a parameter and step", "ranks", "codec", "replay", "state"], [4, 5, 6]);
  by("segments-rows").replaceChildren(...segments.map((one) => el("tr", {},
    el("th", { class: "text", scope: "row" }, one.last === undefined || one.last === null ? `from ${integer(one.first)}` : one.last === one.first ? `none after ${integer(one.first)}` : `${integer(one.first + 1)} to ${integer(one.last)}`),
    el("td", {}, bytes(one.stored_nbytes ?? null)), el("td", {}, one.nbytes_per_parameter === undefined ? "\u2013" : `${number(one.nbytes_per_parameter)} B`), el("td", {}, one.ranks === undefined ? "\u2013" : integer(one.ranks)),
    el("td", { class: "text" }, one.codec === undefined ? "\u2013" : named(one.codec, 80)), el("td", { class: "text" }, replays(one)),
    el("td", { class: "text" }, one.has_ended === false ? el("span", { class: "kind changed" }, "not ended") : one.has_ended ? "ended" : "\u2013"))));
  by("values").replaceChildren(...segments.flatMap((one) => Object.entries(one.torn || {}).map(([file, reason]) => el("li", {},
    el("span", { class: "mono" }, named(file, 120)), el("span", {}, `Records after step ${integer(one.last)} do not count: `, named(reason, 400))))));
}

const approximateStates = states.length > 0;
head();
by("sizes").hidden = !members.length;
by("sizes-note").textContent = `${isDense ? "The largest states of each column of the picture; bases are dots" : `A bar for each ${memberNoun}`}${segments.length ? "; below them, the steps that the log of gradients has" : ""}.`;
by("sizes-legend").append(...[["base", "base"], ["delta", "delta"], ...(segments.length ? [["segment", "log of gradients"]] : [])].map(([look, text]) => el("span", {}, el("i", { class: `swatch ${look}`, "aria-hidden": "true" }), text)));
by("errors").hidden = !approximateStates;
by("errors-note").textContent = `Measured when a state was stored, on a logarithmic axis. ${isDense ? "The band has all errors of a column of the picture, the line is their geometric mean." : "States without a point are exact."}`;
by("errors-legend").append(...states.map((state, i) => el("span", {}, el("i", { class: `swatch e${Math.min(i, 5)}`, "aria-hidden": "true" }), named(state, 60))));
if (members.length) {
  const redraw = fitted(by("sizes-chart"), (wide) => sizesChart(wide, 280));
  by("size").addEventListener("change", redraw);
  if (approximateStates) by("error").addEventListener("change", fitted(by("errors-chart"), (wide) => errorsChart(wide, 240)));
}
segmentTable();
by("members").hidden = !members.length;
listing({
  id: "members", noun: memberNoun, rows: members, sort: "step", kind: (row) => row.kind, kinds: ["base", "delta"],
  words: (row) => [row.step, row.name ?? "", row.parent ?? "", row.kind, ...row.codecs].join(" "),
  columns: [
    ...(isFamily ? [
      { key: "name", title: "model", text: true, value: (row) => row.name, cell: (row) => named(row.name, 120) },
      { key: "parent", title: "parent", text: true, value: (row) => row.parent ?? "", cell: (row) => (row.parent === null ? "\u2013" : named(row.parent, 120)) },
    ] : []),
    { key: "step", title: isFamily ? "number" : "step", up: true, value: (row) => row.step, cell: (row) => integer(row.step) },
    { key: "kind", title: "kind", text: true, value: (row) => row.kind, cell: (row) => el("span", { class: `kind ${row.kind}` }, row.kind) },
    { key: "stored", title: "stored", value: (row) => row.stored_nbytes, cell: (row) => bytes(row.stored_nbytes) },
    { key: "raw", title: "raw", value: (row) => row.raw_nbytes, cell: (row) => bytes(row.raw_nbytes) },
    { key: "ratio", title: "ratio", value: (row) => row.ratio, cell: (row) => times(row.ratio) },
    { key: "reads", title: "to restore", value: (row) => row.restore.reads_nbytes, cell: (row) => `${bytes(row.restore.reads_nbytes)}, ${plural(row.restore.deltas, "delta")}` },
    { key: "values", title: "values", text: true, value: (row) => accuracy(row), cell: (row) => el("span", { class: row.exact ? "good" : null }, accuracy(row)) },
    { key: "codecs", title: "codecs", text: true, value: (row) => row.codecs.join(", "), cell: (row) => named(row.codecs.join(", "), 120) },
    { key: "time", title: "written", text: true, value: (row) => row.time, cell: (row) => named(row.time.replace("T", " ").replace("Z", " UTC"), 40) },
  ],
});
