// Everything on the page of `diff` is drawn.

function pictures() {
  map();
  histograms();
}

head();
stateButtons(pictures);
values();
redrawTensors = listing({
  id: "tensors", noun: "tensor", columns: COLUMNS, rows: facts.tensors, keep: isListed, sort: "relative",
  kind: (row) => row.kind, kinds: ["changed", "retyped", "reshaped", "missing", "added", "equal"],
});
by("measure").addEventListener("change", map);
by("grouping").addEventListener("change", histograms);
by("table-state").addEventListener("change", table);
by("tensors-unselect").addEventListener("click", () => pick(chosen.picked));
let waiting = 0;
addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(pictures, 120); });
