"""`load_file`: all weights of a checkpoint of any format as a dict of tensors."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file as reference
from safetensors.torch import save_file

import ckpt
from ckpt_training import load_file
from damage import SAMPLES
from held import flip


@pytest.mark.parametrize("mmap", [False, True])
def test_load_file_returns_the_tensors_of_safetensors_from_every_format(mmap: bool, tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(0)
    dtypes = (torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int64, torch.bool)
    weights = {f"w{i}": torch.randn(30, 5, generator=random).to(dtype) for i, dtype in enumerate(dtypes)}
    weights |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3)}
    save_file(weights, tmp_path / "a.safetensors")
    source = ckpt.open(tmp_path / "a.safetensors")
    ckpt.save(source, tmp_path / "coded", ckpt.Universal(codec="auto"))
    ckpt.save(source, tmp_path / "a.pt")
    truth = reference(tmp_path / "a.safetensors")
    for name in ("a.safetensors", "coded", "a.pt"):
        loaded = load_file(tmp_path / name, mmap=mmap)
        assert loaded.keys() == truth.keys()
        for key, tensor in loaded.items():
            assert (tensor.dtype, tensor.shape) == (truth[key].dtype, truth[key].shape)
            assert to_bytes(tensor) == to_bytes(truth[key])
            tensor.zero_()  # the file stays as it was
    assert load_file(source.cast("fp16"))["w1"].dtype == torch.float16


def to_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def test_load_file_shares_tied_weights_and_finds_damage(tmp_path: Path) -> None:
    ckpt.copy(SAMPLES / "deepspeed-0.19-zero3-bf16-dp4-tied-frozen", tmp_path / "run")
    run = ckpt.open(tmp_path / "run")
    loaded = load_file(tmp_path / "run")
    assert run.aliases
    assert all(loaded[alias] is loaded[name] for alias, name in run.aliases.items())
    (place, *_) = run["head.weight"].weight.sources()
    flip(place.path, place.offset)
    with pytest.raises(ckpt.CorruptError, match="do not fit"):
        load_file(tmp_path / "run")
