"""Tables of which only some rows were stepped: a chain stores these rows alone."""

from pathlib import Path

import numpy as np
import pytest

from ckpt.chains.chain import Chain
from ckpt_codecs.delta import StatePair
from ckpt_codecs.registry import delta_from_config
from ckpt_formats.core.checkpoint import Group
from delta_cases import OPTIONS, fitted, table
from held import checkpoint, contents, parameter


@pytest.mark.parametrize(("many", "codecs"), [(12, ("rows",)), (299, ("replay",)), (300, ("replay",))])
def test_a_chain_stores_the_rows_that_were_stepped(many: int, codecs: tuple[str, ...], tmp_path: Path) -> None:
    change, step = table(many, 3)
    groups = (Group(OPTIONS, ("embed",)),)
    chain = Chain(tmp_path / "run")
    for number, states in ((20, change.before), (21, change.after)):
        chain.append(checkpoint([parameter("embed", states, step=number)], groups), step=number)
    member = chain.index.members[-1]
    assert member.codecs == codecs
    assert contents(chain[21]) == contents(checkpoint([parameter("embed", change.after)]))
    if codecs == ("rows",):
        rows = np.flatnonzero((change.after["fp32"] != change.before["fp32"]).any(axis=1))
        alone = StatePair(*({n: v[rows] for n, v in s.items()} for s in (change.before, change.after)))
        codec = delta_from_config({"name": "replay"})
        whole, few = (len(fitted(codec, one, step).encode(one)) for one in (change, alone))
        found = len(fitted(delta_from_config({"name": "rows"}), change, step).encode(change))
        assert found <= few + 100  # that, and which rows they are
        assert found < whole / 3
