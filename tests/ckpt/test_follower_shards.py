"""Followers of tensor-parallel ranks: shards that join to the whole, of few bytes of the chain, wherever they ended."""

import json
import random
from functools import cache, partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from ckpt import Follower
from ckpt.following import decode
from ckpt.following.follow import FollowEvent, follow_into
from ckpt_formats.core.errors import InvalidArgumentError, RulesError
from ckpt_formats.universal.published.records import StepName
from followed_weights import flip, objects_of
from killing import killed, points
from published import PublishedRun, Weights
from recording_server import recording_server

FILES = {"config.json": json.dumps({"num_attention_heads": 8, "num_key_value_heads": 4}).encode()}
LAYER = "model.layers.0"
RULES = """
[[rule]]
match = 'strange'
axis = 1
fused = [4, 2]
"""


@cache
def weights_at(step: int) -> Weights:
    """Weights of which each step changes a few: tensors split by rows, by columns and not at all, with padding."""
    random = np.random.default_rng(5)
    shapes = {
        "model.embed_tokens.weight": (641, 512),
        f"{LAYER}.self_attn.q_proj.weight": (1536, 512),
        f"{LAYER}.self_attn.o_proj.weight": (512, 1536),
        f"{LAYER}.mlp.gate_up_proj.weight": (8, 6),
        "model.norm.weight": (33,),
        "strange": (3, 6),
    }
    weights = {name: random.normal(0, 0.02, shape).astype(ml_dtypes.bfloat16) for name, shape in shapes.items()}
    for _ in range(step):
        for one in weights.values():
            changed = random.integers(0, one.size, -(-one.size // 500))
            one.reshape(-1).view(np.uint16)[changed] += 1
    return weights


def shards_of(weights: Weights, rank: int) -> Weights:
    """The shards of one of two ranks, cut by hand."""
    embed, q, o, gate_up, norm, strange = weights.values()
    padded = np.concatenate([embed, np.zeros((1, 512), embed.dtype)])
    gate, up = np.split(gate_up, 2)
    own = [
        np.split(padded, 2)[rank],
        np.split(q, 2)[rank],
        np.split(o, 2, axis=1)[rank],
        np.concatenate([np.split(gate, 2)[rank], np.split(up, 2)[rank]]),
        norm,
        np.concatenate([np.split(strange[:, :4], 2, 1)[rank], np.split(strange[:, 4:], 2, 1)[rank]], axis=1),
    ]
    return dict(zip(weights, own, strict=True))


def bits(weights: Weights) -> dict[str, tuple[Any, ...]]:
    return {name: (one.dtype, one.shape, one.tobytes()) for name, one in weights.items()}


@pytest.fixture
def run(tmp_path: Path) -> PublishedRun:
    """Steps 1 to 3 of three ranks; step 1 is a base."""
    run = PublishedRun(tmp_path / "policy.chain", weights_at(1), ranks=3, files=FILES)
    for step in range(1, 4):
        run.publish(step, weights_at(step))
    return run


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "rules.toml"
    path.write_text(RULES)
    return path


def test_followers_have_the_shards_of_each_step(
    run: PublishedRun, rules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "_WHOLE_NBYTES", 0)  # ranges are read of objects of any size
    for rank in range(2):
        with Follower(run.run, patience=0.0, tp=2, rank=rank, rules=rules) as follower:
            written = {name: np.zeros_like(one) for name, one in shards_of(weights_at(0), rank).items()}
            applied = {name: one.copy() for name, one in written.items()}
            first = 3 + rank * 4
            for step in range(first, first + 4):
                if step > 3:
                    run.publish(step, weights_at(step), base=step == first + 2)
                if step == first + 3:
                    run.fold(first + 1, step)
                expected = shards_of(weights_at(step), rank)
                for change in follower.iter_changes():
                    at = slice(None) if change.indices is None else change.indices
                    assert change.is_whole is (step == first)
                    assert change.is_whole or len(change.values) < change.values.size + expected[change.name].size / 50
                    written[change.name].reshape(-1)[at] = change.values.reshape(-1)
                follower.confirm()
                assert bits(written) == bits(expected)
                assert bits(follower.tensors()) == bits(expected)
                follower.apply_to(applied)
                assert bits(applied) == bits(expected)


def test_shard_is_read_by_the_ranges_that_it_needs(tmp_path: Path, rules: Path) -> None:
    names = ["model.embed_tokens.weight"]
    weights = {name: np.random.default_rng(1).normal(size=(8192, 512)).astype(np.float32) for name in names}
    run = PublishedRun(tmp_path / "policy.chain", weights)
    run.publish(1, weights)
    nbytes = objects_of(run, None, 1)[0].stat().st_size
    events = list[FollowEvent]()
    follow_into(run.run, tmp_path / "served", events.append, once=True, tp=4, rank=1)
    assert events[-1].advance is not None
    assert 0.24 * nbytes < events[-1].advance.nbytes < 0.27 * nbytes


def served(target: Path) -> tuple[StepName, Weights]:
    path = target / "current"
    record = json.loads((path / "published-step.json").read_bytes())
    with safe_open(path / "model.safetensors", "np") as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        assert file.metadata()["tensor_parallel"] == f"rank {target.name} of 2"
    return StepName(record["epoch"], record["step"]), weights


def test_killed_followers_serve_shards_that_join_wherever_they_ended(
    run: PublishedRun, rules: Path, tmp_path: Path
) -> None:
    chosen, step, kills = random.Random(3), 3, 0
    names = run.states[StepName(1, 1)]

    def follow(rank: int) -> None:
        notified.append(len(notified))
        options = {"notify": server.url} if rank else {}  # one of them writes in place
        follow_into(run.run, tmp_path / str(rank), lambda _: None, once=True, tp=2, rank=rank, rules=rules, **options)

    notified = list[int]()
    with recording_server() as server:
        for rank in range(2):
            follow(rank)
        number = points(partial(follow, 0), tmp_path / "0")
        for _ in range(5):
            step += 1
            run.publish(step, weights_at(step), base=step == 6)
            for rank in range(2):
                target = tmp_path / str(rank)
                kills += killed(partial(follow, rank), target, chosen.randrange(number + 12))
                if (target / "current").exists():
                    name, own = served(target)
                    expected = shards_of(run.states[name], rank)
                    assert bits({one: own[one] for one in names}) == bits(expected)
                follow(rank)
                name, own = served(target)
                assert name.step == step
    assert kills > 3


@pytest.mark.parametrize("place", ["model.safetensors", ".chunks"])
def test_damaged_shard_is_discarded_and_written_anew(
    run: PublishedRun, rules: Path, tmp_path: Path, place: str
) -> None:
    target, kinds = tmp_path / "0", list[str]()

    def follow(**options: Any) -> None:
        report = lambda event: kinds.append(event.kind)  # noqa: E731
        follow_into(run.run, target, report, once=True, tp=2, rules=rules, **options)

    follow()
    flip(target / "current" / place, 100)
    follow()
    assert kinds == ["serving", "discarded", "serving"]
    follow(rank=1)  # another rank's shards are not its own
    assert kinds[3:] == ["discarded", "serving"]


def test_follower_refuses_what_cannot_be_sharded(run: PublishedRun, rules: Path) -> None:
    with Follower(run.run, tp=2) as follower, pytest.raises(RulesError, match="`strange`"):
        follower.update()
    with (
        Follower(run.run, tp=16, rules=rules) as follower,
        pytest.raises(RulesError, match="its 8 heads do not divide"),
    ):
        follower.update()
    with pytest.raises(InvalidArgumentError, match="rank 2 does not exist: there are 2 ranks"):
        Follower(run.run, tp=2, rank=2)
