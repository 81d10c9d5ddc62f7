"""A checkpoint against what the memory of the real engine held when it was saved."""

from typing import Any

from ckpt_formats.core.checkpoint import MODEL, Checkpoint
from ckpt_formats.core.tensor import read
from torch_values import same


def assert_is_the_truth(found: Checkpoint, truth: dict[str, Any]) -> None:
    """All values, roles, names, ties and groups are those of the truth file."""
    for name, states in truth["params"].items():
        parameter = found.parameters[name]
        assert parameter.role == "parameter", name
        for state, expected in states.items():
            assert same(parameter.states[MODEL if state == "lp" else state], expected), f"{name}/{state}"
        raw = {step for group in truth["raw_step"] for step in group}
        if raw:
            kept = parameter.states.get("step")
            step = parameter.values.get("step") if kept is None else read(kept).item()
            # Fused Adam leaves all but one count of a stage 0 group at zero; the one that counts is the largest.
            assert step is None or step == max(max(raw), truth["step"]) or step in raw - {0}, name
    for part, role in (("frozen", "frozen"), ("buffers", "buffer")):
        for name, expected in truth[part].items():
            assert found.parameters[name].role == role, name
            assert same(found.parameters[name].states[MODEL], expected), name
    known = {*truth["params"], *truth["frozen"], *truth["buffers"]}
    assert {name for name, p in found.parameters.items() if p.role != "extra"} == known
    assert dict(found.aliases) == {
        alias: name for alias, name in truth.get("tied", {}).items() if alias in found.aliases
    }
    assert [list(group.names) for group in found.groups] == [group["names"] for group in truth["param_groups"]]
