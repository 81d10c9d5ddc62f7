// Histograms of sizes: outlines, or strips where there are many. `HISTOGRAMS` has the words of the page.

const MOST = 2000; // layers, chips or histograms that are drawn
const rest = (n) => (n > MOST ? el("p", { class: "note" }, `The first ${integer(MOST)} of ${integer(n)} are drawn; the table has all.`) : null);

function outline(histogram, across, base, tall) {
  const most = largest(histogram.counts);
  let path = `M${across(histogram.lowest).toFixed(1)},${base}`;
  histogram.counts.forEach((count, i) => {
    const y = (base - count / most * tall).toFixed(1), k = histogram.lowest + i;
    path += `L${across(k).toFixed(1)},${y}L${across(k + 1).toFixed(1)},${y}`;
  });
  return `${path}L${across(histogram.lowest + histogram.counts.length).toFixed(1)},${base}Z`;
}

function histograms() {
  const grouping = by("grouping").value;
  const rows = facts[grouping].filter((row) => grouping === "states" || row.state === chosen.state).map((row) => ({
    name: grouping === "states" ? labelOf(row.state) : shown(grouping === "roles" ? row.role || "(itself)" : row.layer), ...row,
  }));
  const all = rows.filter((row) => row.histogram.counts.length), drawn = all.slice(0, MOST), place = by("histograms");
  place.classList.toggle("many", rows.length > 40);
  if (rows.length > 40) place.setAttribute("tabindex", 0); else place.removeAttribute("tabindex");
  if (!drawn.length) {
    place.replaceChildren(el("p", { class: "note" }, rows.length ? HISTOGRAMS.nothing : "There is nothing to count."));
    return;
  }
  const tall = drawn.length <= 24 ? 38 : drawn.length <= 60 ? 22 : 9;
  const room = place.clientWidth - 4 || 1000, right = room > 620 ? 128 : 0;
  const left = clamp(largest(drawn.map((row) => row.name.length)) * 7 + 14, 60, room * 0.3);
  let low = smallest(drawn.map((row) => row.histogram.lowest)), high = largest(drawn.map((row) => row.histogram.lowest + row.histogram.counts.length));
  while (high - low < 8) { low -= 1; high += 1; } // room for two powers of ten
  const across = (k) => left + (k - low) / (high - low) * (room - left - right);
  const bottom = drawn.length * tall, top = drawn.length > 12 ? 22 : 0;
  const rowsDrawn = drawn.map((row, i) => histogramRow(row, i, tall, across, left, room, right));
  const picture = svg("svg", { width: room, height: top + bottom + 26, viewBox: `0 0 ${room} ${top + bottom + 26}`, role: "group", "aria-label": HISTOGRAMS.title },
    svg("g", { transform: `translate(0 ${top})` }, axis(low, high, across, bottom, top > 0), ...rowsDrawn));
  const still = rows.length - all.length;
  place.replaceChildren(picture, still ? el("p", { class: "note" }, `${plural(still, "row has", "rows have")} ${HISTOGRAMS.none} and ${still === 1 ? "is" : "are"} left out.`) : "", rest(all.length) || "");
}

function histogramRow(row, i, tall, across, left, room, right) {
  const base = (i + 1) * tall - 2, most = largest(row.histogram.counts);
  const highest = row.histogram.lowest + row.histogram.counts.indexOf(most), peak = `${number(2 ** highest)} to ${number(2 ** (highest + 1))}`;
  const group = svg("g", { role: "img", "aria-label": `${row.name}: ${HISTOGRAMS.spoken(row, peak)}` });
  if (tall >= 20) group.append(svg("path", { class: "hist", d: outline(row.histogram, across, base, tall - 6) }));
  else row.histogram.counts.forEach((count, k) => {
    const x = across(row.histogram.lowest + k), wide = across(row.histogram.lowest + k + 1) - x + 0.3;
    if (count) group.append(svg("rect", { class: "strip", x, y: base - tall + 1, width: wide, height: tall - 0.5, "fill-opacity": (0.04 + 0.96 * count / most).toFixed(3) }));
  });
  if (tall >= 20 || i % 2 === 0) {
    group.append(svg("text", { class: "role", x: left - 9, y: base - (tall >= 30 ? 9 : 1), "text-anchor": "end" }, svg("title", {}, row.name), short(row.name, Math.floor((left - 12) / 7))));
    if (right) group.append(svg("text", { x: room - right + 12, y: base - (tall >= 30 ? 9 : 1) }, HISTOGRAMS.beside(row)));
  }
  group.append(svg("rect", { class: "hit", x: 0, y: i * tall, width: room, height: tall, ...tipping(() => [el("b", {}, row.name), pairs(HISTOGRAMS.rows(row, peak))]) }));
  return group;
}

function axis(low, high, across, bottom, above) {
  const group = svg("g", { class: "axis", "aria-hidden": "true" }), per = Math.log2(10);
  const every = [1, 2, 3, 5, 10, 20, 50, 100].find((n) => across(low + n * per) - across(low) >= 54) || 200;
  for (let ten = Math.ceil(low / per / every) * every; ten * per <= high; ten += every) {
    const x = across(ten * per);
    group.append(svg("line", { x1: x, x2: x, y1: 0, y2: bottom }));
    for (const y of above ? [bottom + 18, -8] : [bottom + 18]) {
      group.append(svg("text", { x, y, "text-anchor": "middle" }, "10", svg("tspan", { dy: -5, "font-size": 9 }, String(ten).replace("-", "\u2212"))));
    }
  }
  group.append(svg("line", { class: "base", x1: across(low), x2: across(high), y1: bottom, y2: bottom }));
  return group;
}
