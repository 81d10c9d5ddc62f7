"""The list of formats: where each is, and by which marks it is recognised, before it is imported.

A row has an import path, not a class, so that the list of names imports no format.
The order is the order of detection: specific formats first.
"""

import re
from functools import cache
from typing import NamedTuple

from ckpt_formats.containers.file_starts import SAFETENSORS, TAR
from ckpt_formats.registry.marks import Marks


class ListedFormat(NamedTuple):
    """What is known of a format before it is imported."""

    place: str
    """The module and the class."""
    marks: Marks
    is_written: bool = True


_POINTER_OF_MEGATRON = "latest_checkpointed_iteration.txt"
_DICT_OF_MSGPACK = re.compile(rb"[\x81-\x8f\xde\xdf]")
_SAFETENSORS = ("*.safetensors", "*.safetensors.index.json")
_TORCH = ("*.pt", "*.pth", "*.bin", "*.ckpt")

FORMATS: dict[str, ListedFormat] = {
    "universal": ListedFormat("ckpt_formats.universal:Universal", Marks(("manifest.json",), (), ("*.ucp",))),
    "chain": ListedFormat("ckpt_formats.universal.chain.format:ChainFormat", Marks(("chain.json",)), is_written=False),
    "deepspeed-universal": ListedFormat(
        "ckpt_formats.engines.deepspeed.universal:DeepSpeedUniversal",
        Marks(("zero/optimizer_state.pt", "latest_universal")),
    ),
    "megatron": ListedFormat("ckpt_formats.engines.megatron:MegatronDist", Marks(("common.pt", _POINTER_OF_MEGATRON))),
    "megatron-legacy": ListedFormat(
        "ckpt_formats.engines.megatron:MegatronLegacy",
        Marks((_POINTER_OF_MEGATRON,), ("mp_rank_*/model_optim_rng.pt",)),
    ),
    "deepspeed": ListedFormat(
        "ckpt_formats.engines.deepspeed:DeepSpeed", Marks(("latest",), ("*_model_states.pt", "*_optim_states.pt"))
    ),
    "torchtune": ListedFormat(
        "ckpt_formats.engines.torchtune:Torchtune", Marks(("recipe_state/recipe_state.pt",)), is_written=False
    ),
    "fairseq2": ListedFormat(
        "ckpt_formats.engines.fairseq2:Fairseq2", Marks(("model/pp_00", "pp_00")), is_written=False
    ),
    "hf": ListedFormat(
        "ckpt_formats.engines.hf:HuggingFace",
        Marks(
            ("model_index.json", "modules.json", "sharded"),
            ("*.bin", "*.bin.index.json", *_SAFETENSORS, "pytorch_model_fsdp_*"),
        ),
    ),
    "fsdp-ranks": ListedFormat(
        "ckpt_formats.engines.fsdp_ranks:FsdpRanks", Marks((), ("*rank*",), ("*rank*",)), is_written=False
    ),
    # Its folders may be inside folders of any names, those of the steps of a run.
    "dcp": ListedFormat(
        "ckpt_formats.engines.dcp:DCP",
        Marks((".metadata", "pytorch_model_fsdp_0", "optimizer_0", "checkpoint"), ("*",), ("*.metadata", "__*")),
    ),
    "orbax": ListedFormat(
        "ckpt_formats.engines.orbax:Orbax",
        Marks(
            # Last in a store, in the order of names: `commit_success.txt`.
            ("_METADATA", "_CHECKPOINT_METADATA", "commit_success.txt", "checkpoint", "tensorstore_index.json"),
            (
                "manifest.ocdbt",
                *("*.orbax-checkpoint-tmp*", "*/_METADATA", "*/_CHECKPOINT_METADATA", "*/manifest.ocdbt"),
                *("*/.zarray", "*/zarr.json", "*/default/_METADATA", "*/state/_METADATA", "*/items/_METADATA"),
                *("*/params/_METADATA", "*/pytree/_METADATA", "*/process_metadata", "*/checkpoint"),
                "*/tensorstore_index.json",
            ),
        ),
    ),
    "safetensors": ListedFormat(
        "ckpt_formats.engines.safetensors:Safetensors", Marks((), _SAFETENSORS, _SAFETENSORS, SAFETENSORS)
    ),
    "flax": ListedFormat(
        "ckpt_formats.engines.flax:Flax",
        Marks(("flax_model.msgpack", "flax_model.msgpack.index.json"), ("*_*[0-9]",), ("*.msgpack",), _DICT_OF_MSGPACK),
    ),
    "gguf": ListedFormat("ckpt_formats.engines.gguf:Gguf", Marks((), (), ("*.gguf",), re.compile(rb"GGUF"))),
    "numpy": ListedFormat(
        "ckpt_formats.engines.npz:NumPy",
        Marks((), (), ("*.npz",), re.compile(rb"PK\x03\x04.{26}[^\0]{1,255}?\.npy", re.DOTALL)),
        is_written=False,
    ),
    "stable-baselines3": ListedFormat(
        "ckpt_formats.engines.stable_baselines3:StableBaselines3",
        Marks((), (), ("*.zip",), re.compile(rb"PK\x03\x04.{26}(data[^./]|\w+\.pth)", re.DOTALL)),
        is_written=False,
    ),
    "tar": ListedFormat("ckpt_formats.engines.tar:Tar", Marks((), (), ("*.tar", "*.nemo"), TAR), is_written=False),
    "torch": ListedFormat("ckpt_formats.engines.torch_save:Torch", Marks((), (), _TORCH, re.compile(rb"[P\x80]"))),
    "torch-folder": ListedFormat(
        "ckpt_formats.engines.torch_folder:TorchFolder", Marks((), (*_TORCH, "*.pkl", "*.tar")), is_written=False
    ),
}
"""By name, in the order in which they are asked whether they know a path."""
ONLY_READ = tuple(name for name, format in FORMATS.items() if not format.is_written)


def is_mark(file: str) -> bool:
    """Whether a file, by its path in a checkpoint, is one by which a format knows the whole."""
    name = file.rpartition("/")[2]
    return name.endswith(".index.json") or name in _marking_names()


@cache
def _marking_names() -> frozenset[str]:
    return frozenset(path.rpartition("/")[2] for format in FORMATS.values() for path in format.marks.paths)
