"""Tables of which only some rows were stepped: a chain stores these rows alone."""

from pathlib import Path

import numpy as np
import pytest

from ckpt.chains.chain import Chain
from ckpt.chains.write import DeltaPolicy
from ckpt_codecs.delta import StatePair
from ckpt_codecs.registry import delta_from_config
from ckpt_formats.core.checkpoint import Group
from ckpt_formats.core.tensor import read
from delta_cases import OPTIONS, fitted, table
from held import checkpoint, contents, named, parameter


@pytest.mark.parametrize(("many", "codecs"), [(12, ("rows",)), (299, ("replay",)), (300, ("replay",))])
def test_a_chain_stores_the_rows_that_were_stepped(many: int, codecs: tuple[str, ...], tmp_path: Path) -> None:
    change, step = table(many, 3)
    groups = (Group(OPTIONS, ("embed",)),)
    chain = Chain(tmp_path / "run")
    for number, states in ((20, change.before), (21, change.after)):
        chain.append(checkpoint([parameter("embed", named(states), step=number)], groups), step=number)
    member = chain.index.members[-1]
    assert member.codecs == codecs
    assert contents(chain[21]) == contents(checkpoint([parameter("embed", named(change.after))]))
    if codecs == ("rows",):
        rows = np.flatnonzero((change.after["fp32"] != change.before["fp32"]).any(axis=1))
        alone = StatePair(*({n: v[rows] for n, v in s.items()} for s in (change.before, change.after)))
        codec = delta_from_config({"name": "replay"})
        whole, few = (len(fitted(codec, one, step).encode(one)) for one in (change, alone))
        nbytes = len(fitted(delta_from_config({"name": "rows"}), change, step).encode(change))
        assert nbytes <= few + 100  # that, and which rows they are
        assert nbytes < whole / 3


def test_a_lossy_chain_stores_the_rows_that_were_stepped_and_leaves_all_others_exact(tmp_path: Path) -> None:
    change, _ = table(40, 3)
    groups = (Group(OPTIONS, ("embed",)),)
    sizes = {}
    for codec in ("subspace:rel_error=0.2", "subspace-rows:rel_error=0.2"):
        chain = Chain(tmp_path / codec.partition(":")[0])
        for number, states in ((20, change.before), (21, change.after)):
            state = checkpoint([parameter("embed", named(states), step=number)], groups)
            chain.append(state, DeltaPolicy(codec=codec), step=number)
        member = chain.index.members[-1]
        assert member.codecs == ("subspace-rows",)
        sizes[codec] = member.stored_nbytes
        restored = read(chain[21]["embed"].states["master"])
        stepped = (change.after["fp32"] != change.before["fp32"]).any(axis=1)
        assert restored[~stepped].tobytes() == change.after["fp32"][~stepped].tobytes()
        error, moved = (np.linalg.norm(one - change.after["fp32"]) for one in (restored, change.before["fp32"]))
        assert 0 < error <= 0.2 * moved
    assert abs(np.subtract(*sizes.values())) < 100  # nobody has to ask for it
