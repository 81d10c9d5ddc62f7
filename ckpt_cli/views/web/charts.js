// What pages with curves share: durations, bytes, and a picture that is as wide as its place.

const UNITS = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1], ["ms", 1e-3], ["\u00b5s", 1e-6]];

function duration(seconds) {
  if (!seconds) return "0 s";
  const [unit, size] = UNITS.find(([, n]) => seconds >= n) || UNITS[UNITS.length - 1];
  return `${Number((seconds / size).toPrecision(3))} ${unit}`;
}

function bytes(count) {
  if (count === null) return "\u2013";
  let value = count, unit = "B";
  for (const next of ["KiB", "MiB", "GiB", "TiB", "PiB"]) { if (value < 1024) break; value /= 1024; unit = next; }
  return `${Number(value.toPrecision(3))} ${unit}`;
}

/** Draw into an element, and again when its width changes, so that text is never scaled. Returns a function that draws anew. */
function fitted(place, draw) {
  let width = 0;
  const fit = () => {
    const now = clamp(Math.floor(place.clientWidth), 280, 1400);
    if (now === width) return;
    width = now;
    hideTip();
    place.replaceChildren(draw(width, width < 600 ? 300 : 420));
  };
  new ResizeObserver(fit).observe(place);
  fit();
  return () => { width = 0; fit(); };
}

/** Every n-th, so that at most so many are left. */
const thinned = (list, most) => list.filter((_, i) => i % Math.ceil(list.length / Math.max(most, 1)) === 0);

/** A rectangle outside of which curves are not drawn. */
function clipped(id, x, y, width, height) {
  return svg("clipPath", { id }, svg("rect", { x, y, width, height }));
}
