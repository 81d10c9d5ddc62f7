"""Partial recovery: lost blocks from a chain, all else live; and saves of only the blocks that moved most."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from ckpt.chains.restore import open_step
from ckpt.partial.changes import block_changes, within_budget
from ckpt.partial.lost_blocks import RankSet, lost_by_rank
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.format import ReadOptions
from ckpt_formats.core.tensor import Array, read
from ckpt_formats.registry.opening import open_checkpoint
from damage import ckpt
from held import contents
from training import chained

STEPS, SAVED = 4, 2
"""The live state is the last one; blocks are taken from an earlier one."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of four states, `step1` to `step4`, their chain, and the last one for two ranks."""
    folder = chained(tmp_path_factory.mktemp("whole"), STEPS)
    for form, *options in (("dcp", "--dp", 2), ("deepspeed", "--dp", 2, "--zero", 1)):
        done = ckpt("convert", folder / f"step{STEPS}", folder / form, "--to", form, *options)
        assert done.code == 0, done.err
    return folder


def values(source: Checkpoint) -> dict[tuple[str, str], Array]:
    return {(p.name, state): read(tensor) for p, state, tensor in source.tensors()}


def restore(whole: Path, out: Path, live: object, *options: object) -> dict[str, object]:
    done = ckpt("restore", whole / "run", out, "--step", SAVED, "--partial", "--live", live, *options, "--json")
    assert done.code == 0, done.err
    report: dict[str, object] = json.loads(done.out)
    return report


@pytest.mark.parametrize("form", ["universal", "torch", "dcp"])
def test_a_lost_parameter_is_the_saved_one_and_all_else_is_live(form: str, whole: Path, tmp_path: Path) -> None:
    report = restore(whole, tmp_path / "out", whole / f"step{STEPS}", "--lost", r"^embed\.", "--to", form)
    restored = open_checkpoint(tmp_path / "out")
    live, saved = (contents(open_checkpoint(whole / f"step{step}")) for step in (STEPS, SAVED))
    taken = {key for key in live if key[0].startswith("embed.") and key[1] != "step"}
    assert contents(restored) == {key: (saved if key in taken else live)[key] for key in live}
    assert any(live[key] != saved[key] for key in taken)
    assert restored.step == STEPS
    elements = sum(int(np.prod(live[key][1])) for key in taken)
    expected = {"states": len(taken), "older": elements, "oldest_step": SAVED, "step": STEPS}
    assert {**expected, "elements": report["partial"]["elements"]} == report["partial"]  # type: ignore[index, call-overload]
    if form == "universal":  # it says so itself
        assert set(restored.errors) == taken
        shown = ckpt("inspect", tmp_path / "out")
        assert f"blocks of earlier steps, on purpose, the oldest of step {SAVED}" in shown.err
        assert ckpt("verify", tmp_path / "out").code == 0


def test_blocks_of_a_lost_file_are_the_saved_ones(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole / "dcp", tmp_path / "live")
    (tmp_path / "live" / "__1_0.distcp").unlink()
    assert ckpt("inspect", tmp_path / "live").code == 20  # no other command takes it
    restore(whole, tmp_path / "out", tmp_path / "live")
    masks = lost_elements(open_checkpoint(whole / "dcp"), RankSet((1,)))
    assert_mixed(open_checkpoint(tmp_path / "out"), whole, masks)
    shutil.copy(whole / "dcp" / "__1_0.distcp", tmp_path / "live")
    (tmp_path / "live" / "__0_0.distcp").unlink()  # it has the optimizer's options, too
    done = ckpt("restore", whole / "run", tmp_path / "no", "--partial", "--live", tmp_path / "live")
    assert (done.code, "values that are not tensors" in done.err) == (20, True), done.err
    restore(whole, tmp_path / "again", whole / "dcp", "--lost-ranks", "1")  # as if the file were damaged
    assert contents(open_checkpoint(tmp_path / "again")) == contents(open_checkpoint(tmp_path / "out"))


def test_a_block_of_zero_is_of_one_step_in_all_states(whole: Path, tmp_path: Path) -> None:
    live = open_checkpoint(whole / "deepspeed")
    restore(whole, tmp_path / "out", whole / "deepspeed", "--lost-ranks", "dp=1")
    masks = lost_elements(live, RankSet((1,), "dp"))
    assert any(0 < mask.sum() < mask.size for mask in masks.values())  # a partition ends within a tensor
    for name in {name for name, state in masks if state == "exp_avg"}:
        assert np.array_equal(masks[name, "master"], masks[name, "exp_avg"])
        assert np.array_equal(masks[name, "master"], masks.get((name, "model"), masks[name, "master"]))
    assert_mixed(open_checkpoint(tmp_path / "out"), whole, masks)


def lost_elements(live: Checkpoint, ranks: RankSet) -> dict[tuple[str, str], Array]:
    masks = {key: np.zeros(array.shape, bool) for key, array in values(live).items()}
    for key, boxes in lost_by_rank(live, [ranks]).items():
        for box in boxes:
            masks[key][box.index] = True
    assert any(mask.any() for mask in masks.values())
    return masks


def assert_mixed(actual: Checkpoint, whole: Path, masks: dict[tuple[str, str], Array]) -> None:
    live, saved = (values(open_checkpoint(whole / f"step{step}")) for step in (STEPS, SAVED))
    differing = 0
    for key, mask in masks.items():
        if key not in live:  # a master of which the run saved the model's copy alone
            continue
        expected = np.where(mask, saved[key], live[key])
        assert np.array_equal(values(actual)[key], expected, equal_nan=True), key
        differing += int((expected != live[key]).sum())
    assert differing


def test_a_saved_state_of_the_same_step_is_a_repair(whole: Path, tmp_path: Path) -> None:
    done = ckpt(
        "restore", whole / "run", tmp_path / "out", "--partial", "--live", whole / f"step{STEPS}", "--lost", "head"
    )
    assert done.code == 0, done.err
    assert "exact: every bit is as it was saved" in done.out
    assert contents(open_checkpoint(tmp_path / "out")) == contents(open_checkpoint(whole / f"step{STEPS}"))


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("--live", "step4", "--lost", "embed"), 2, "say so with --partial"),
        (("--partial",), 2, "needs --live"),
        (("--partial", "--live", "step4"), 10, "nothing is lost"),
        (("--partial", "--live", "step4", "--lost", "no such"), 10, "no parameter matches"),
        (("--partial", "--live", "dcp", "--lost-ranks", "7"), 10, "no file belongs to rank 7"),
        (("--partial", "--live", "step1", "--lost", "embed"), 22, "later than step 1"),
        (("--partial", "--live", "step4", "--lost-ranks", "1"), 22, "not of single ranks"),
    ],
)
def test_partial_recovery_refuses_what_it_cannot_do(
    arguments: tuple[str, ...], code: int, text: str, whole: Path, tmp_path: Path
) -> None:
    words = [whole / word if (whole / word).exists() else word for word in arguments]
    done = ckpt("restore", whole / "run", tmp_path / "out", *words)
    assert (done.code, text in done.err) == (code, True), done.err
    assert not (tmp_path / "out").exists()


def test_the_blocks_that_moved_most_are_saved_first(whole: Path) -> None:
    saved, current = (open_checkpoint(whole / f"step{step}") for step in (SAVED, STEPS))
    for norm in (1, 2):
        changes = block_changes(saved, current, norm)  # type: ignore[arg-type]
        weights = [values(source) for source in (saved, current)]
        for change in changes:
            before, after = (of[change.name, "model"].astype(np.float64) for of in weights)
            moved = np.concatenate([(after - before)[box.index].reshape(-1) for box in change.boxes])
            assert np.isclose(np.linalg.norm(moved, norm), change.distance)
        assert [one.distance for one in changes] == sorted((one.distance for one in changes), reverse=True)
        assert len(changes) > len({one.name for one in changes})  # a large parameter has several blocks
    budget = within_budget(changes, 0.5)
    assert budget == changes[: len(budget)]
    assert sum(one.nbytes for one in budget) <= sum(one.nbytes for one in changes) / 2


def test_a_partial_save_stores_its_share_and_says_what_is_older(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (1, 2, 3):
        shutil.copy(whole / f"step{step}", tmp_path / f"step{step}")
    assert ckpt("append", run, tmp_path / "step1").code == 0
    full = json.loads(ckpt("append", run, tmp_path / "step2", "--json").out)
    done = ckpt("append", run, tmp_path / "step3", "--partial", "25%", "--json")
    assert done.code == 0, done.err
    report = json.loads(done.out)
    assert report["stored_nbytes"] < 0.6 * full["stored_nbytes"]
    assert report["exact"] is False
    state = open_step(run, 3, ReadOptions()).checkpoint
    saved, current = (open_checkpoint(whole / f"step{step}") for step in (2, 3))
    chosen = within_budget(block_changes(saved, current), 0.25)
    mixed, old, new = (values(source) for source in (state, saved, current))
    for (name, kind), array in mixed.items():
        expected = new[name, kind].copy()
        if (name, kind) in state.errors:
            expected[...] = old[name, kind]
            for change in (change for change in chosen if change.name == name):
                for box in change.boxes:
                    expected[box.index] = new[name, kind][box.index]
        assert np.array_equal(array, expected), (name, kind)
    assert {figures["oldest_step"] for figures in state.errors.values()} == {2}
    assert ckpt("verify", run).code == 0
    done = ckpt("append", run, whole / "step4", "--json")  # a full delta makes the chain exact again
    assert json.loads(done.out)["exact"] is True, done.err
    ckpt("restore", run, tmp_path / "out")
    assert contents(open_checkpoint(tmp_path / "out")) == contents(open_checkpoint(whole / "step4"))
