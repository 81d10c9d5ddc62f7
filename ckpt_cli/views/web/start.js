// The states to choose from; and everything is drawn.

const states = () => [...new Set(facts.tensors.map((row) => row.state))];

function stateButtons() {
  const place = by("states"), all = states();
  const choose = (state) => {
    chosen.state = state;
    for (const button of place.children) {
      const on = button.dataset.state === state;
      button.setAttribute("aria-checked", String(on));
      button.tabIndex = on ? 0 : -1;
    }
    map();
    histograms();
  };
  place.append(...all.map((state) => el("button", { type: "button", role: "radio", "data-state": state, title: shown(state), onclick: () => choose(state) }, labelOf(state))));
  place.addEventListener("keydown", (event) => {
    const turn = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!turn) return;
    event.preventDefault();
    const next = place.children[(all.indexOf(chosen.state) + turn + all.length) % all.length];
    choose(next.dataset.state);
    next.focus();
  });
  by("table-state").append(el("option", { value: "" }, "all"), ...all.map((state) => el("option", { value: state }, labelOf(state))));
  if (all.length) choose(all[0]);
  else { map(); histograms(); }
}

head();
stateButtons();
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
addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(() => { map(); histograms(); }, 120); });
