"""One small checkpoint of every format, by the format's name: for what all formats keep."""

import io
import json
import shutil
import tarfile
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import megatron_models
from ckpt.job import save
from ckpt_formats.containers.gguf import BLOCK_TYPES, header_bytes, placed
from ckpt_formats.core.edits import select
from ckpt_formats.registry import writable
from ckpt_formats.registry.opening import open_checkpoint
from damage import SAMPLES
from rank_files import rows, write

WEIGHTS = {"0.weight": torch.arange(12.0).reshape(3, 4), "0.bias": torch.arange(3.0)}
ZERO1 = SAMPLES / "deepspeed-0.19-zero1-bf16-dp2"


def optimizer_state(weights: dict[str, torch.Tensor]) -> dict[str, object]:
    """What `state_dict` of an Adam says after seven steps."""
    states = {i: {"step": torch.tensor(7.0), "exp_avg": one + 1} for i, one in enumerate(weights.values())}
    return {"state": states, "param_groups": [{"lr": 0.1, "params": list(states)}]}


def sample(name: str) -> Callable[[Path], Path]:
    def make(target: Path) -> Path:
        (found,) = SAMPLES.glob(name)
        return Path(shutil.copytree(found, target, ignore=shutil.ignore_patterns("truth.safetensors")))

    return make


def converted(name: str, ending: str = "") -> Callable[[Path], Path]:
    def make(target: Path) -> Path:
        save(open_checkpoint(ZERO1), target.with_name(target.name + ending), writable(name))
        return target.with_name(target.name + ending)

    return make


def fairseq2(step: Path, ranks: int = 1) -> Path:
    """What fairseq2's checkpoint manager writes: with FSDP, each rank has its rows."""
    for rank in range(ranks):
        parts = {name: one.chunk(ranks)[rank].clone() for name, one in WEIGHTS.items() if rank < len(one.chunk(ranks))}
        contents = {
            f"model/pp_00/tp_00/sdp_{rank:02}.pt": parts,
            f"optimizer/pp_00/tp_00/sdp_{rank:02}.pt": optimizer_state(parts),
            f"trainer/rank_{rank:02}.pt": {"_step_nr": 7, "_lr_scheduler": {"last_epoch": 7}},
            f"data_reader/dp_{rank:02}.pt": {"position": rank},
        }
        for file, content in contents.items():
            (step / file).parent.mkdir(parents=True, exist_ok=True)
            torch.save(content, step / file)
    return step


def _deepspeed_universal(target: Path) -> Path:
    """A few parameters of what DeepSpeed's converter wrote: it takes four files for each."""
    (converted_by_deepspeed,) = SAMPLES.glob("ds_to_universal-*-zero1-bf16-dp2")
    some = ("odd", "word.weight", "norm.bias")
    save(select(open_checkpoint(converted_by_deepspeed), some, ()), target, writable("deepspeed-universal"))
    return target


def _dcp(target: Path) -> Path:
    """What torch writes in one process."""
    states = {name: {"step": torch.tensor(7.0), "exp_avg": one + 1} for name, one in WEIGHTS.items()}
    optim = {"state": states, "param_groups": [{"lr": 0.1, "params": [*WEIGHTS]}]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that there are no other processes
        dcp.save({"model": WEIGHTS, "optim": optim, "seed": 7}, checkpoint_id=target, no_dist=True)
    return target


def _fsdp_ranks(target: Path) -> Path:
    weight = torch.arange(35.0).reshape(7, 5)
    moments = {"w": {"step": torch.tensor(5.0), "exp_avg": weight}}
    return write(
        target,
        2,
        model=lambda rank: {"w": rows(weight, 2), "b": torch.arange(4.0)},
        optim=lambda rank: {"state": moments, "param_groups": [{"lr": 0.1, "params": ["w"]}]},
        extra_state=lambda rank: {"seed": rank},
    )


def _gguf(target: Path) -> Path:
    values = {"general.architecture": "llama", "llama.block_count": np.uint32(1)}
    tensors = placed([(name, BLOCK_TYPES["F32"], tuple(one.shape)) for name, one in WEIGHTS.items()], 32)
    data = [one.numpy().tobytes().ljust(-(-4 * one.numel() // 32) * 32, b"\0") for one in WEIGHTS.values()]
    target.with_suffix(".gguf").write_bytes(header_bytes(values, tensors) + b"".join(data))
    return target.with_suffix(".gguf")


def _megatron(name: str) -> Callable[[Path], Path]:
    """A model of one layer, on two ranks."""

    def make(target: Path) -> Path:
        source = megatron_models.model("llama", megatron_models.args_of("llama", 1, 8))
        save(source, target, writable(name, tp=2))
        return target

    return make


def _numpy(target: Path) -> Path:
    np.savez(target.with_suffix(".npz"), **{name: one.numpy() for name, one in WEIGHTS.items()})
    return target.with_suffix(".npz")


def _stable_baselines3(target: Path) -> Path:
    agent = Path(__file__).parents[1] / "foreign_files" / "stable-baselines3-2.9.zip"
    return Path(shutil.copyfile(agent, target.with_suffix(".zip")))


def _tar(target: Path) -> Path:
    weights = io.BytesIO()
    torch.save(WEIGHTS, weights)
    members = {"./model_config.yaml": b"lr: 1\n", "./model_weights.ckpt": weights.getvalue()}
    with tarfile.open(target.with_suffix(".nemo"), "w:") as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return target.with_suffix(".nemo")


def _torch_folder(target: Path) -> Path:
    target.mkdir()
    torch.save(WEIGHTS, target / "model.pt")
    torch.save(optimizer_state(WEIGHTS), target / "optimizer.pt")
    torch.save({"last_epoch": 7}, target / "scheduler.pt")
    return target


def _torchtune(target: Path) -> Path:
    (target / "epoch_0").mkdir(parents=True)
    (target / "recipe_state").mkdir()
    save_file(WEIGHTS, target / "epoch_0" / "model.safetensors", {"format": "pt"})
    (target / "epoch_0" / "config.json").write_text(json.dumps({"model_type": "new"}))
    torch.save({"seed": 7, "epochs_run": 1}, target / "recipe_state" / "recipe_state.pt")
    return target


MAKE: dict[str, Callable[[Path], Path]] = {
    "universal": converted("universal"),
    "chain": sample("universal-1-delta"),
    "deepspeed-universal": _deepspeed_universal,
    "megatron": _megatron("megatron"),
    "megatron-legacy": _megatron("megatron-legacy"),
    "deepspeed": sample("deepspeed-*-zero1-bf16-dp2"),
    "torchtune": _torchtune,
    "fairseq2": fairseq2,
    "hf": sample("transformers-*-trainer"),
    "fsdp-ranks": _fsdp_ranks,
    "dcp": _dcp,
    "orbax": converted("orbax"),
    "safetensors": converted("safetensors", ".safetensors"),
    "flax": converted("flax", ".msgpack"),
    "gguf": _gguf,
    "numpy": _numpy,
    "stable-baselines3": _stable_baselines3,
    "tar": _tar,
    "torch": converted("torch", ".pt"),
    "torch-folder": _torch_folder,
}
