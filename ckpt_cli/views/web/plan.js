// The plan: a verdict, the curves of waste over the interval, and a table.

const NAMES = { bases: "bases only", logged: "with a log", young: "Young", daly: "Daly" };
const LEFT = 50, RIGHT = 14, TOP = 12, BOTTOM = 44;
const every = (steps) => `${plural(steps, "step")} (${duration(steps * facts.run.step)})`;
const schedules = ["bases", "logged", "young", "daly"].filter((name) => facts[name]);

function head() {
  const best = facts[facts.best];
  verdict(`A base every ${every(best.base_steps)}`, "plan");
  const flush = best.flush_steps === null ? "" : ` and a flush of the log every ${every(best.flush_steps)}`;
  const log = !facts.logged ? "A log of gradients was not planned." : facts.log_pays
    ? `The log pays: the run takes ${percent(facts.bases.gain)} less time than with bases only.`
    : "A log of gradients does not pay: bases only waste less.";
  by("lead").textContent = `With it${flush}, failures and checkpoints waste ${percent(best.waste)} of the time. ${log}`;
  by("tiles").append(
    tile("wasted", percent(best.waste), "of the time"),
    tile("a failure every", duration(facts.run.mtbf), "on average"),
    ...(facts.young.gain >= 1e-3 ? [tile("against Young", percent(facts.young.gain), "less time")] : []),
    ...(best.day_nbytes === null ? [] : [tile("written", bytes(best.day_nbytes), "a day")]),
  );
}

function ticks(low, high) {
  const nice = [1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.1, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 3600, 7200, 14400, 43200, 86400, 172800, 604800, 2592000, 31536000];
  return nice.filter((n) => n >= low && n <= high);
}

function chart(wide, tall) {
  const all = Object.values(facts.curves).flat(), seconds = all.map(([steps]) => steps * facts.run.step);
  const low = smallest(seconds), high = Math.max(largest(seconds), low * 1.0001);
  const shownWaste = schedules.map((name) => facts[name].waste), bands = Object.values(facts.simulated);
  const most = clamp(Math.max(2.5 * largest(shownWaste), ...bands.map((one) => 1.1 * one.high)), 1e-6, 1);
  const power = 10 ** Math.floor(Math.log10(most / 4)), rung = [1, 2, 5, 10].find((n) => n * power >= most / 4) * power;
  const lines = Math.min(Math.ceil(most / rung), Math.floor(1 / rung + 1e-9)), top = lines * rung;
  const across = (s) => LEFT + Math.log(s / low) / Math.log(high / low) * (wide - LEFT - RIGHT);
  const up = (w) => tall - BOTTOM - w / top * (tall - TOP - BOTTOM), clampedUp = (w) => up(clamp(w, 0, top));
  const picture = svg("svg", { width: wide, height: tall, viewBox: `0 0 ${wide} ${tall}`, role: "group", "aria-label": "Waste over the interval between bases" });
  picture.append(clipped("inside", LEFT, TOP - 2, wide - LEFT - RIGHT, tall - TOP - BOTTOM + 4));
  const grid = svg("g", { class: "axis", "aria-hidden": "true" });
  for (let i = 0; i <= lines; i += 1) {
    const y = up(rung * i);
    grid.append(svg("line", { x1: LEFT, x2: wide - RIGHT, y1: y, y2: y }), svg("text", { x: LEFT - 8, y: y + 4, "text-anchor": "end" }, percent(rung * i)));
  }
  for (const s of thinned(ticks(low, high), (wide - LEFT) / 75)) grid.append(svg("line", { x1: across(s), x2: across(s), y1: TOP, y2: tall - BOTTOM }), svg("text", { x: across(s), y: tall - BOTTOM + 18, "text-anchor": "middle" }, duration(s)));
  grid.append(svg("text", { x: (LEFT + wide - RIGHT) / 2, y: tall - 6, "text-anchor": "middle" }, "interval between bases, in time of steps"));
  picture.append(grid);
  for (const [name, points] of Object.entries(facts.curves)) {
    const near = points.filter(([, waste]) => waste <= 4 * top);
    const path = near.map(([steps, waste], i) => `${i ? "L" : "M"}${across(steps * facts.run.step).toFixed(1)},${up(waste).toFixed(1)}`).join("");
    picture.append(svg("path", { class: `curve ${name}`, d: path, "clip-path": "url(#inside)" }));
  }
  const simulated = Object.entries(facts.simulated).map(([name, one]) => [name, one, across(facts[name].base_seconds)]);
  for (const [name, one, x] of simulated) picture.append(svg("line", { class: `range ${name}`, x1: x, x2: x, y1: clampedUp(one.low), y2: clampedUp(one.high) }));
  for (const name of [...schedules].reverse()) picture.append(marker(name, across, clampedUp));
  for (const [, one, x] of simulated) picture.append(svg("circle", { class: "mean", cx: x, cy: clampedUp(one.waste), r: 2.5, "aria-hidden": "true" }));
  return picture;
}

function marker(name, across, up) {
  const one = facts[name], simulated = facts.simulated[name];
  const rows = [["base every", every(one.base_steps)]];
  if (one.flush_steps !== null) rows.push(["flush every", every(one.flush_steps)]);
  rows.push(["wasted", percent(one.waste)]);
  if (simulated) rows.push(["simulated", percent(simulated.waste)]);
  return svg("circle", {
    class: `hit dot ${name === "logged" ? "logged" : "bases"}${facts.curves[name] ? "" : " rule"}`, cx: across(one.base_seconds), cy: up(one.waste), r: facts.curves[name] ? 7 : 5,
    tabindex: 0, role: "img", "aria-label": `${NAMES[name]}: a base every ${every(one.base_steps)} wastes ${percent(one.waste)}`, ...tipping(() => [el("b", {}, NAMES[name]), pairs(rows)]),
  });
}

function table() {
  plainHeads("schedules", ["schedule", "base every", "flush every", "wasted", "simulated", "written a day", "the plan takes"]);
  for (const name of schedules) {
    const one = facts[name], simulated = facts.simulated[name];
    by("schedules-rows").append(el("tr", {}, el("th", { class: "text", scope: "row" }, NAMES[name]), ...[
      every(one.base_steps), one.flush_steps === null ? "\u2013" : every(one.flush_steps), percent(one.waste),
      simulated ? percent(simulated.waste) : "\u2013", bytes(one.day_nbytes), name === facts.best ? "\u2013" : `${percent(one.gain)} less time`,
    ].map((text) => el("td", {}, text))));
  }
}

function inputs() {
  const rows = [["step", duration(facts.run.step)], ["failure every", duration(facts.run.mtbf)], ["stall of a base", duration(facts.run.base_stall)], ["restart", duration(facts.run.restart)]];
  if (facts.run.base_delay) rows.push(["base restorable after", duration(facts.run.base_delay)]);
  if (facts.log) rows.push(["replay of a step", duration(facts.log.replay)], ["recording slows a step by", percent(facts.log.slowdown)], ["stall of a flush", duration(facts.log.flush_stall)]);
  if (facts.rates.base_nbytes !== null) rows.push(["base", bytes(facts.rates.base_nbytes)]);
  if (facts.rates.step_nbytes !== null) rows.push(["step's gradients", bytes(facts.rates.step_nbytes)]);
  if (facts.rates.write_rate !== null) rows.push(["write rate", `${bytes(facts.rates.write_rate)}/s`]);
  by("inputs").append(...rows.map(([name, value]) => el("li", {}, `${name} ${value}`)));
}

head();
for (const name of Object.keys(facts.curves)) by("legend").append(el("span", { class: name }, el("span", { class: "swatch" }), NAMES[name]));
fitted(by("chart"), chart);
table();
inputs();
