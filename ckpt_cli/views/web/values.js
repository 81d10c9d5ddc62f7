// Everything beside tensors.

function values() {
  by("others-note").textContent = facts.tensors_only
    ? "Only tensors were compared."
    : facts.values.length
      ? "Counters, options of the optimizer, and extras such as schedulers and data loaders."
      : "Counters, options of the optimizer and extras are the same on both sides.";
  by("values").replaceChildren(...facts.values.map((value) => {
    const found = /^([^]*?): ([^]*) -> ([^]*)$/.exec(value) || /^([^]*?): (only in the (?:first|second), )([^]*)$/.exec(value);
    if (!found) return el("li", {}, el("span", { class: "mono" }, shown(value)));
    const [, place, before, after] = found;
    const change = before.startsWith("only in the ") && !value.includes(" -> ")
      ? el("span", {}, before, el("span", { class: "mono" }, shown(after)))
      : el("span", { class: "mono" }, el("del", { class: "before" }, shown(before)), " \u2192 ", el("ins", { class: "after" }, shown(after)));
    return el("li", {}, el("span", { class: "mono" }, shown(place)), change);
  }));
}
