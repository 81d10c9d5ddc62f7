// What is told of the cell that is pointed at, or that has the focus.

function tipping(content) {
  return {
    onpointermove: (event) => tip(content(), event.clientX, event.clientY),
    onpointerleave: hideTip,
    onfocus: (event) => {
      const at = event.currentTarget.getBoundingClientRect();
      if (event.currentTarget.matches(":focus-visible")) tip(content(), at.right, at.bottom);
    },
    onblur: hideTip,
  };
}

function tip(nodes, x, y) {
  const box = by("tip");
  box.replaceChildren(...nodes);
  box.hidden = false;
  const { width, height } = box.getBoundingClientRect();
  box.style.left = `${Math.max(4, x + 16 + width > innerWidth ? x - width - 12 : x + 16)}px`;
  box.style.top = `${Math.max(4, y + 16 + height > innerHeight ? y - height - 12 : y + 16)}px`;
}

function hideTip() { by("tip").hidden = true; }

function tipOf(cell) {
  const parts = [el("b", {}, shown(fullName(cell)))];
  if (cell.numbers) {
    const n = cell.numbers;
    parts.push(pairs([
      ["changed", `${percent(n.elements ? n.changed / n.elements : null)} of ${integer(n.elements)}`],
      ["relative", number(n.relative)], ["RMS", number(n.rms)], ["max", number(n.max)], ["cosine", cosine(n.cosine)],
    ]));
    if (n.histogram.counts.length) parts.push(small(n.histogram));
  }
  for (const row of cell.apart.slice(0, 3)) parts.push(el("div", {}, `${row.kind}: ${shown(row.what)}`));
  return parts;
}

const pairs = (rows) => el("dl", {}, ...rows.flatMap(([key, value]) => [el("dt", {}, key), el("dd", {}, value)]));

function small(histogram) {
  const low = histogram.lowest, high = low + histogram.counts.length, across = (k) => (k - low) / (high - low) * 240;
  return svg("svg", { width: 240, height: 54 }, svg("path", { class: "hist", d: outline(histogram, across, 38, 36) }),
    svg("text", { x: 0, y: 51 }, number(2 ** low)), svg("text", { x: 240, y: 51, "text-anchor": "end" }, number(2 ** high)),
    svg("text", { x: 120, y: 51, "text-anchor": "middle" }, "|change|"));
}
