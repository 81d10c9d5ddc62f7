"""A format may detect a path only if one of its marks is there, because it is not asked otherwise."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_formats.registry import FORMATS, format_named
from ckpt_formats.registry.marks import Marks, PathMarks
from damage import SAMPLES

NAMES = [
    "manifest.json",
    "chain.json",
    "latest",
    "latest_universal",
    "zero/optimizer_state.pt",
    "latest_checkpointed_iteration.txt",
    "common.pt",
    "metadata.json",
    "mp_rank_00/model_optim_rng.pt",
    "mp_rank_00_001/model_optim_rng.pt",
    "mp_rank_00_model_states.pt",
    "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
    "layer_00-model_00-model_states.pt",
    "recipe_state/recipe_state.pt",
    "model.safetensors",
    "model.safetensors.index.json",
    "adapter_model.safetensors",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "pytorch_model-00001-of-00002.bin",
    "pytorch_model_fsdp.bin",
    "diffusion_pytorch_model.bin",
    "model_index.json",
    "modules.json",
    "1_Pooling/config.json",
    "sharded/shard-00001-model-00001-of-00001.safetensors",
    "pytorch_model_fsdp_0/.metadata",
    "model_world_size_2_rank_0.pt",
    "pytorch_model_fsdp_rank0.bin",
    "model_Rank0.pt",
    "model-RANKS_0.pth",
    ".metadata",
    ".metadata.tmp",
    "__0.metadata",
    "__0_0.distcp",
    "optimizer_0/.metadata",
    "step-10/.metadata",
    "checkpoint/step-10/.metadata",
    "_METADATA",
    "_CHECKPOINT_METADATA",
    "manifest.ocdbt",
    "params.kernel/.zarray",
    "params.kernel/zarr.json",
    "10/_METADATA",
    "10/_CHECKPOINT_METADATA",
    "step_10/manifest.ocdbt",
    "10/default/_METADATA",
    "10/state/_METADATA",
    "10/items/_METADATA",
    "10/params/_METADATA",
    "10.orbax-checkpoint-tmp-1/d/x",
    "flax_model.msgpack",
    "flax_model.msgpack.index.json",
    "x.msgpack",
    "x.pt",
    "x.pth",
    "x.bin",
    "x.ckpt",
    "x.pkl",
    "x.pth.tar",
    "x.pt.tar",
    "x.safetensors",
    "x",
    "other.txt",
    "config.json",
    "optimizer.pt",
    "scheduler.pt",
    "trainer_state.json",
    "training_args.bin",
    "random_states_0.pkl",
    "adapter_config.json",
    "x.npz",
    "x.gguf",
    "model/pp_00/tp_00/sdp_00.pt",
    "pp_00/tp_00/sdp_00.pt",
]
STARTS = (b"", b"PK\x03\x04", b"\x80\x02", b"\x81\xa1a", b"\xde\x00\x01\xa1a", b"{}", b"GGUF", bytes(257) + b"ustar")
"""How files begin: empty, a zip archive, a pickle, dicts of MessagePack, JSON, GGUF, a tar."""
TOGETHER = [["mp_rank_00/model_optim_rng.pt", "latest_checkpointed_iteration.txt"], [".metadata", "common.pt"]]
TOGETHER += [["modules.json", "1_Pooling/config.json"], ["model.safetensors", "config.json"], ["x.bin", "optimizer.pt"]]
TOGETHER += [["pytorch_model_fsdp_0/.metadata", "scheduler.pt"], ["model_rank0.pt", "model_rank1.pt"]]


def checked(paths: Iterator[Path]) -> set[str]:
    """The formats that detect one of these paths, each of which has one of their marks."""
    detected = set()
    for path in paths:
        at = PathMarks(path)
        for name in FORMATS:
            if format_named(name).detect(path):
                assert at.has_any(FORMATS[name].marks), (name, path)
                detected.add(name)
    return detected


def test_each_format_has_marks() -> None:
    assert not [name for name, format in FORMATS.items() if format.marks == Marks()]


def test_sample_that_a_format_detects_has_its_marks() -> None:
    assert len(checked(path for path in (SAMPLES, *SAMPLES.rglob("*")) if path.suffix != ".safetensors")) > 6


@pytest.mark.parametrize("start", STARTS, ids=lambda start: repr(start[-12:]))
def test_name_that_a_format_detects_has_its_marks(start: bytes, tmp_path: Path) -> None:
    def places() -> Iterator[Path]:
        for i, names in enumerate([*([name] for name in NAMES), *TOGETHER]):
            for name in names:
                (tmp_path / str(i) / name).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / str(i) / name).write_bytes(start)
                yield tmp_path / str(i) / name
            yield tmp_path / str(i)

    detected = checked(places())
    if start == b"PK\x03\x04":
        # The pointer of Megatron must have a number, an archive of Stable-Baselines3 its members, and a tar its head.
        assert detected >= set(FORMATS) - {"megatron", "stable-baselines3", "tar"}, set(FORMATS) - detected
    if b"ustar" in start:
        assert "tar" in detected
