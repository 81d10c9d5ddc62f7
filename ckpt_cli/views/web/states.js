// The states to choose from: `chosen.state` is the one that is shown.

const STATES = {
  model: "weights", master: "master weights", exp_avg: "first moments", exp_avg_sq: "second moments",
  momentum_buffer: "momenta", max_exp_avg_sq: "largest second moments",
};
const states = () => [...new Set(facts.tensors.map((row) => row.state))];

/** Buttons for all states, of which the first is chosen. `draw` shows the chosen one. */
function stateButtons(draw) {
  const place = by("states"), all = states();
  const choose = (state) => {
    chosen.state = state;
    for (const button of place.children) {
      const on = button.dataset.state === state;
      button.setAttribute("aria-checked", String(on));
      button.tabIndex = on ? 0 : -1;
    }
    draw();
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
  else draw();
}
