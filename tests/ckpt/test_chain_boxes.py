"""Chains with members of boxes: appended to, compacted, copied, and begun anew by other boxes."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from boxed import RANKS, BoxedRun, checkpoint_at
from ckpt.chains.append import append
from ckpt.chains.compact import Retention, compact
from ckpt.chains.write import DeltaPolicy
from ckpt.pipeline import Execution
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.universal.chain import chain_file
from ckpt_formats.universal.chain.chain_file import LoggedSteps
from damage import ckpt
from gradient_logs import TIME, Log, small_layout
from held import contents

EFFORT = Execution(1)


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four members of boxes, a delta of whole tensors against the last, and boxes of another layout, a base."""
    folder = tmp_path_factory.mktemp("chain")
    run = BoxedRun(folder / "run", folder)
    run.save(1, plain=True)
    for step in (2, 3, 4):
        run.save(step, delta=True)
    append(run.run, checkpoint_at(5), 5, DeltaPolicy(), EFFORT)
    others = BoxedRun(run.run, folder, RANKS[::-1], list(chain_file.read(run.run).members))
    others.save(6, codec="auto")
    others.save(7, delta=True)
    return run.run


def kinds(run: Path) -> list[tuple[int, str]]:
    return [(member.step, member.kind) for member in chain_file.read(run).members]


def assert_states(run: Path) -> None:
    for step, _ in kinds(run):
        assert contents(open_checkpoint(Path(f"{run}@{step}"))) == contents(checkpoint_at(step)), step
    done = ckpt("verify", run)
    assert done.code == 0, done


def test_whole_tensors_and_other_boxes_continue_a_chain_of_boxes(chain: Path) -> None:
    assert kinds(chain) == [
        (1, "base"), (2, "delta"), (3, "delta"), (4, "delta"), (5, "delta"), (6, "base"), (7, "delta")
    ]  # fmt: skip
    assert_states(chain)
    assert ckpt("diff", f"{chain}@4", f"{chain}@4").code == 0


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        ("3,5", [(3, "base"), (5, "delta"), (7, "delta")]),
        ("last:4", [(4, "base"), (5, "delta"), (6, "base"), (7, "delta")]),
        ("1,2,4", [(1, "base"), (2, "delta"), (4, "delta"), (7, "delta")]),
    ],
)
def test_compact_writes_whole_tensors_where_it_writes(
    chain: Path, tmp_path: Path, keep: str, expected: list[tuple[int, str]]
) -> None:
    run = shutil.copytree(chain, tmp_path / "run")
    result = compact(run, Retention(keep=(keep,)), DeltaPolicy(), EFFORT)
    assert kinds(run) == expected
    assert_states(run)
    before = {member.folder for member in result.before.members}
    for member in result.after.members:
        version = json.loads((run / member.folder / "manifest.json").read_bytes())["version"]
        assert member.folder in before or version == 1


@pytest.mark.slow
def test_compact_does_not_write_the_boxes_anew_from_which_a_log_goes_on(chain: Path, tmp_path: Path) -> None:
    run = shutil.copytree(chain, tmp_path / "run")
    before = chain_file.read(run)
    parent = before.members[2].content
    logged = LoggedSteps(f"gradients-{3:010}", "run", 3, 3, parent, TIME)
    layout = replace(small_layout(first=3), parent=parent)
    Log(layout, [[], []], []).write(run, chain=chain_file.dump(replace(before, segments=(logged,))))
    with pytest.raises(UnsupportedError, match="step 3 has boxes, and a log of gradients continues it"):
        compact(run, Retention(keep=("5",)), DeltaPolicy(), EFFORT)
    assert kinds(run) == kinds(chain)
    compact(run, Retention(keep=("1,2,5",)), DeltaPolicy(), EFFORT)
    assert kinds(run) == [(1, "base"), (2, "delta"), (3, "delta"), (5, "delta"), (7, "delta")]
    assert chain_file.read(run).members[2].content == parent


def test_append_refuses_a_parent_whose_values_it_cannot_compare(chain: Path, tmp_path: Path) -> None:
    run = shutil.copytree(chain, tmp_path / "run")
    with pytest.raises(UnsupportedError, match="the chain's last state is stored as boxes"):
        append(run, checkpoint_at(8), 8, DeltaPolicy(), EFFORT, parent=checkpoint_at(7))
    append(run, checkpoint_at(8), 8, DeltaPolicy(tip=True), EFFORT)
    assert kinds(run)[-1] == (8, "delta")
    assert_states(run)


def test_a_copy_and_a_cut_copy_have_the_same_states(chain: Path, tmp_path: Path) -> None:
    assert ckpt("copy", chain, tmp_path / "copy").code == 0
    assert_states(tmp_path / "copy")
