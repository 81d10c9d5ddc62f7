"""A checkpoint against what the memory of the real engine held when it was saved."""

from typing import Any

from ckpt_formats.core.checkpoint import MODEL, Checkpoint
from ckpt_formats.core.state_names import from_stored
from ckpt_formats.core.tensor import read
from torch_values import same


def assert_is_the_truth(actual: Checkpoint, truth: dict[str, Any]) -> None:
    """All values, roles, names, ties and groups are those of the truth file."""
    for name, states in truth["params"].items():
        parameter = actual.parameters[name]
        assert parameter.role == "parameter", name
        for state, expected in states.items():
            assert same(parameter.states[MODEL if state == "lp" else from_stored(state)], expected), f"{name}/{state}"
        raw = {step for group in truth["raw_step"] for step in group}
        if raw:
            kept = parameter.states.get("step")
            step = parameter.values.get("step") if kept is None else read(kept).item()
            # Fused Adam leaves all but one count of a stage 0 group at zero; the one that counts is the largest.
            assert step is None or step == max(max(raw), truth["step"]) or step in raw - {0}, name
    for part, role in (("frozen", "frozen"), ("buffers", "buffer")):
        for name, expected in truth[part].items():
            assert actual.parameters[name].role == role, name
            assert same(actual.parameters[name].states[MODEL], expected), name
    known = {*truth["params"], *truth["frozen"], *truth["buffers"]}
    assert {name for name, p in actual.parameters.items() if p.role != "extra"} == known
    assert dict(actual.aliases) == {
        alias: name for alias, name in truth.get("tied", {}).items() if alias in actual.aliases
    }
    assert [list(group.names) for group in actual.groups] == [group["names"] for group in truth["param_groups"]]
