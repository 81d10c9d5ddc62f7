"""What lies in torch files as values: each is read right, refused, or spoken of, by all commands alike."""

import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_formats.registry import open_checkpoint
from damage import UNSAFE, Ran, ckpt


def saved(folder: Path, value: Any, **options: Any) -> Path:
    torch.save(value, folder / "saved.pt", **options)
    return folder / "saved.pt"


def by_all(path: Path) -> list[Ran]:
    """What the three commands say of a file."""
    return [ckpt("inspect", path), ckpt("verify", path), ckpt("convert", path, path.parent / "target")]


# A value that repeats its parts without end


def nested(wrap: Callable[[Any], Any], levels: int = 30) -> Any:
    made: Any = [1]
    for _ in range(levels):
        made = wrap(made)
    return made


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held


LAUGHS: dict[str, Callable[[], Any]] = {
    "lists": lambda: nested(lambda inner: [inner] * 10),
    "tuples": lambda: nested(lambda inner: (inner,) * 10),
    "dicts": lambda: nested(lambda inner: dict.fromkeys("abcdefghij", inner)),
    "objects": lambda: nested(lambda inner: [Holder(inner), Holder(inner), Holder(inner)]),
    "ordered dicts": lambda: nested(lambda inner: torch.nn.modules.module.OrderedDict.fromkeys("abcd", inner)),
    "on a tensor": lambda: _with_attribute(nested(lambda inner: [inner] * 10)),
}


def _with_attribute(value: Any) -> torch.Tensor:
    made = torch.ones(2)
    made.set = value  # type: ignore[attr-defined]
    return made


@pytest.mark.parametrize("kind", LAUGHS)
def test_a_value_that_repeats_its_parts_without_end_is_refused_by_all_commands_at_once(
    kind: str, tmp_path: Path
) -> None:
    path = saved(tmp_path, {"w": torch.ones(2), "x": LAUGHS[kind]()})
    open_checkpoint(saved(tmp_path, {"w": torch.ones(2)}))  # what is imported once is not counted
    path = saved(tmp_path, {"w": torch.ones(2), "x": LAUGHS[kind]()})
    tracemalloc.start()
    began = time.process_time()
    ran = by_all(path)
    spent, most = time.process_time() - began, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [one.code for one in ran] == [UNSAFE] * 3
    assert all("again and again" in one.err for one in ran)
    assert spent < 3 and most < 100e6
    assert not (tmp_path / "target").exists()


def test_what_is_shared_within_reason_is_read(tmp_path: Path) -> None:
    betas, row = (0.9, 0.95), list(range(50))
    groups = [{"betas": betas, "row": row} for _ in range(20_000)]
    path = saved(tmp_path, {"w": torch.ones(2), "groups": groups})
    assert [one.code for one in by_all(path)] == [0, 0, 0]
