"""Arguments in another order than a command has them are refused with the line that was meant."""

import json
import shlex
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckpt_cli.main import USAGE
from ckpt_cli.options.argument_order import ORDERS
from damage import ckpt


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, an adapter, and a chain with one state."""
    folder = tmp_path_factory.mktemp("order")
    weight = np.arange(32, dtype=np.float32).reshape(4, 8)
    for name in ("a", "b b", "later"):
        save_file({"layer.weight": weight}, folder / f"{name}.safetensors")
    (folder / "adapter").mkdir()
    prefix = "base_model.model.layer"
    pair = {f"{prefix}.lora_A.weight": weight[:2], f"{prefix}.lora_B.weight": weight[:, :2].copy()}
    save_file(pair, folder / "adapter" / "adapter_model.safetensors")
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    assert ckpt("append", folder / "run.chain", folder / "a.safetensors", "--step", "1").code == 0
    (folder / "empty").mkdir()
    return folder


SWAPPED = {
    "append a.safetensors run.chain --step 2": "append run.chain a.safetensors --step 2",
    "append a.safetensors new.chain --step 2": "append new.chain a.safetensors --step 2",
    "append a.safetensors later.safetensors run.chain": "append run.chain a.safetensors later.safetensors",
    "append --step 2 'b b.safetensors' run.chain": "append --step 2 run.chain 'b b.safetensors'",
    "append run.chain@1 new.chain --step 2": "append new.chain run.chain@1 --step 2",
    "append a.safetensors s3://bucket/run.chain": "append s3://bucket/run.chain a.safetensors",
    "merge-lora adapter a.safetensors out": "merge-lora a.safetensors adapter out",
    "merge-lora out a.safetensors adapter": "merge-lora a.safetensors adapter out",
    "merge-lora out adapter a.safetensors --dry-run": "merge-lora a.safetensors adapter out --dry-run",
    "average out a.safetensors 'b b.safetensors'": "average a.safetensors 'b b.safetensors' out",
    "merge --method linear out a.safetensors run.chain@1": "merge --method linear a.safetensors run.chain@1 out",
}  # fmt: skip


@pytest.mark.parametrize("words", SWAPPED)
def test_swapped_arguments_get_the_line_that_was_meant(
    words: str, places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(places)
    before = sorted(places.rglob("*"))
    done = ckpt(*shlex.split(words))
    assert (done.code, done.out) == (USAGE, "")
    assert f"hint: Write: ckpt {SWAPPED[words]}\n" in done.err
    assert sorted(places.rglob("*")) == before
    meant = ckpt(*shlex.split(SWAPPED[words]), *([] if "s3://" in words else ["--dry-run"]), "--json")
    assert "Write: ckpt" not in meant.out + meant.err, "the line that was meant has the right order"


@pytest.mark.parametrize(
    "words",
    [
        "append new run.chain --step 2 --dry-run",  # an empty name, and a chain whose last state is appended to it
        "append empty run.chain --step 2 --dry-run",
        "append other.chain run.chain --step 2 --dry-run",
        "append run.chain gone",
        "merge-lora a.safetensors adapter out --dry-run",
        "merge-lora gone gone out",
        "average gone a.safetensors out",
        "average a.safetensors 'b b.safetensors' later.safetensors --overwrite --dry-run",
        "merge a.safetensors 'b b.safetensors' out --method linear --dry-run",
    ],
)
def test_arguments_in_order_are_left_alone(words: str, places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(places)
    assert "Write: ckpt" not in ckpt(*shlex.split(words)).err


def test_commands_with_an_order_are_those_that_check_it() -> None:
    from ckpt_cli.options.command import ORDERED

    assert ORDERS.keys() == ORDERED
