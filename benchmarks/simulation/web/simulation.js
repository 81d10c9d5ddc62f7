// Simulated trainings: curves of lost time for one setting at a time, a table, what papers claim, and all sources.

const LEFT = 58, RIGHT = 14, TOP = 12, BOTTOM = 44, LEAST = 1e-4;
const OURS = ["log", "bases", "topk", "shadow", "copies", "parity"], systems = Object.keys(facts.systems);
const look = (system) => `s${systems.indexOf(system)}${OURS.includes(system) ? " own" : ""}`;
const hundredths = (share) => `${(100 * share).toFixed(2)} %`;
const rowsOf = (name) => facts.rows.filter((row) => row.setting === name);
const lost = (effective) => Math.max(LEAST, 1 - effective);

function chart(name, wide, tall) {
  const rows = rowsOf(name), curves = Object.entries(facts.curves[name]).filter(([, points]) => points.length);
  const all = curves.flatMap(([, points]) => points), low = smallest(all.map(([x]) => x)), high = largest(all.map(([x]) => x));
  const shares = [...all.map(([, share]) => lost(share)), ...rows.map((row) => lost(row.effective))];
  const bottom = 10 ** Math.floor(Math.log10(smallest(shares))), top = Math.min(1, largest(shares) * 1.15);
  const across = (x) => LEFT + Math.log(x / low) / Math.log(high / low) * (wide - LEFT - RIGHT);
  const up = (y) => tall - BOTTOM - Math.log(clamp(y, bottom, top) / bottom) / Math.log(top / bottom) * (tall - TOP - BOTTOM);
  const picture = svg("svg", { width: wide, height: tall, viewBox: `0 0 ${wide} ${tall}`, role: "group", "aria-label": "Lost time over the mean time between failures, a curve for each system" });
  const grid = svg("g", { class: "axis", "aria-hidden": "true" });
  for (let power = bottom; power <= top; power *= 10) {
    for (const n of [1, 2, 5]) {
      if (n * power > top * 1.0001) continue;
      grid.append(svg("line", { x1: LEFT, x2: wide - RIGHT, y1: up(n * power), y2: up(n * power) }), svg("text", { x: LEFT - 8, y: up(n * power) + 4, "text-anchor": "end" }, percent(n * power)));
    }
  }
  const ticks = [600, 1800, 3600, 10800, 21600, 43200, 86400, 259200, 604800].filter((x) => x >= low && x <= high * 1.0001);
  for (const x of thinned(ticks, (wide - LEFT) / 75)) {
    grid.append(svg("line", { x1: across(x), x2: across(x), y1: TOP, y2: tall - BOTTOM }), svg("text", { x: across(x), y: tall - BOTTOM + 18, "text-anchor": "middle" }, duration(x)));
  }
  grid.append(svg("text", { x: (LEFT + wide - RIGHT) / 2, y: tall - 6, "text-anchor": "middle" }, "mean time between failures of the job"));
  picture.append(grid);
  for (const [system, points] of curves) {
    const path = points.map(([x, share], i) => `${i ? "L" : "M"}${across(x).toFixed(1)},${up(lost(share)).toFixed(1)}`).join("");
    picture.append(svg("path", { class: `curve ${look(system)}`, d: path }));
  }
  for (const row of rows) {
    const x = across(clamp(row.mtbf, low, high));
    picture.append(svg("line", { class: `error ${look(row.system)}`, x1: x, x2: x, y1: up(lost(row.effective - row.error)), y2: up(lost(row.effective + row.error)) }), svg("circle", {
      class: `hit dot ${look(row.system)}`, cx: x, cy: up(lost(row.effective)), r: 5, tabindex: 0, role: "img",
      "aria-label": `${facts.systems[row.system]}: ${percent(lost(row.effective))} of the time is lost, a failure every ${duration(row.mtbf)}`,
      ...tipping(() => [el("b", {}, facts.systems[row.system]), pairs([["lost", percent(lost(row.effective))], ["standard error", percent(row.error)], ["repeated", plural(Number(row.repeated_steps.toPrecision(3)), "step")], ["back after", duration(row.recovery)]])]),
    }));
  }
  return picture;
}

function table(name) {
  const rows = rowsOf(name), best = largest(rows.map((row) => row.effective));
  by("systems-title").textContent = `${facts.settings[name].title}: a failure every ${duration(facts.settings[name].figures.mtbf.value)}`;
  by("systems-rows").replaceChildren(...rows.map((row) => el("tr", { class: row.effective === best ? "best" : null },
    el("th", { class: "text", scope: "row" }, el("span", { class: `swatch ${look(row.system)}`, "aria-hidden": "true" }), facts.systems[row.system]),
    ...[`${hundredths(row.effective)} \u00b1 ${(100 * row.error).toFixed(2)}`, hundredths(row.overhead), plural(row.every, "step"), number(row.repeated_steps), duration(row.recovery), bytes(row.stored_day || null), bytes(row.sent_day || null)].map((text) => el("td", {}, text)),
    el("td", { class: "notes" }, row.notes.join("; ")))));
}

function claims() {
  by("claims-rows").replaceChildren(...facts.claims.map((one) => el("tr", {}, el("th", { class: "text", scope: "row" }, one.claim), el("td", {}, one.published),
    el("td", { class: one.holds ? null : "differs" }, one.holds ? one.simulated : `${one.simulated} (differs)`), el("td", { class: "text source" }, one.source))));
}

function sources(name) {
  const figures = [...Object.entries(facts.settings[name].figures), ...Object.entries(facts.figures)];
  by("sources-rows").replaceChildren(...figures.map(([key, one]) => el("tr", {}, el("th", { class: "text", scope: "row" }, key.replace(/_/g, " ")), el("td", {}, number(one.value)), el("td", { class: `text source${one.source.startsWith("assumed") ? " assumed" : ""}` }, one.source))));
}

function show(name) {
  redraw();
  table(name);
  sources(name);
}

by("lead").textContent = `${integer(facts.failures)} simulated failures for each system and setting (seed ${facts.seed}). Systems of the literature run by their published mechanisms and figures; nothing here was measured on their machines.`;
by("setting").append(...Object.entries(facts.settings).map(([name, one]) => el("option", { value: name }, one.title)));
by("setting").addEventListener("change", (event) => show(event.target.value));
by("legend").append(...systems.map((system) => el("span", { class: look(system) }, el("span", { class: "line" }), facts.systems[system])));
plainHeads("systems", ["system", "effective", "overhead", "a state each", "steps again", "back after", "stored a day", "sent a day", "notes"], [8]);
plainHeads("claims", ["claim", "published", "simulated", "source"], [3]);
plainHeads("sources", ["figure", "value", "source"], [2]);
const redraw = fitted(by("chart"), (wide, tall) => chart(by("setting").value, wide, tall));
claims();
show(by("setting").value);
