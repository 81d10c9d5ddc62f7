"""Let the real libraries save everything that the tests read: `python tests/jobs/hf_jobs/make.py OUT`.

models/NAME, sharded/NAME    what `save_pretrained` writes, in one file and in several
truth/NAME.pt                {"state", "names" (in the model's order), "logits"}
bin/, fsdp_full/             files of torch: Accelerate's shards, and what FSDP gathers
trainer/NAME, peft/          folders of the Trainer after some steps; `optimizer.truth.pt` beside
accelerate/, two/            Accelerate's `save_state`, with one model and with two
ranks/, consolidated/        PyTorch's HuggingFaceStorageWriter, from two ranks
deepspeed/                   a model of transformers in a ZeRO checkpoint
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch.distributed.checkpoint import save
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

from hf_jobs.models import MODELS, SHARD, STEPS

INPUT = torch.arange(12).reshape(2, 6)


class Tokens(torch.utils.data.Dataset):
    """Sixteen short texts."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(8) * (i + 1)) % 64
        return {"input_ids": tokens, "labels": tokens}


def model_of(name: str) -> torch.nn.Module:
    torch.manual_seed(len(name))
    options = dict(MODELS[name])
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(options.pop("model_type"), **options))
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases, too, are no constants
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model.eval()


def truth_of(model: torch.nn.Module) -> dict[str, Any]:
    with torch.no_grad():
        logits = model.eval()(INPUT).logits
    return {
        "state": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "names": [name for name, _ in model.named_parameters()],
        "logits": logits,
    }


def optimizer_truth(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """States and options by name, from the live objects."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    states = {names[id(parameter)]: state for parameter, state in optimizer.state.items()}
    groups = [
        {**{k: v for k, v in group.items() if k != "params"}, "names": [names[id(p)] for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    return {"states": states, "groups": groups, "weights": dict(model.state_dict())}


def train(model: torch.nn.Module, out: Path) -> None:
    arguments = TrainingArguments(
        output_dir=str(out),
        max_steps=STEPS,
        save_steps=2,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        weight_decay=0.1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Tokens())
    trainer.train()
    torch.save(optimizer_truth(trainer.model, trainer.optimizer.optimizer), out / "optimizer.truth.pt")


class Counter:
    """What a user registers with Accelerate."""

    def state_dict(self) -> dict[str, Any]:
        return {"count": 3, "sums": torch.ones(3)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def accelerated(names: list[str], out: Path) -> None:
    accelerator = Accelerator(cpu=True)
    models = [model_of(name).train() for name in names]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    schedulers = [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1)) for optimizer in optimizers]
    loader = torch.utils.data.DataLoader(Tokens(), batch_size=4, shuffle=True)
    prepared = accelerator.prepare(*models, *optimizers, *schedulers, loader)
    for batch in prepared[-1]:
        for model in models:
            accelerator.backward(model(**batch).loss)
        for step in (*optimizers, *schedulers):
            step.step()
    accelerator.register_for_checkpointing(Counter())
    accelerator.save_state(str(out))
    for i, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        torch.save(optimizer_truth(model, optimizer), out.parent / f"{out.name}.{i}.truth.pt")
    accelerator.free_memory()


def in_bins(out: Path) -> None:
    """Shards of torch, as Accelerate still writes them."""
    model = model_of("llama_tied")
    Accelerator(cpu=True).save_model(model, str(out), max_shard_size=SHARD, safe_serialization=False)
    model.config.save_pretrained(out)


def fsdp_full(out: Path) -> None:
    """The two files of a full state dict: the optimizer by name."""
    model = model_of("llama").train()
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=INPUT, labels=INPUT).loss.backward()
    optimizer.step()
    out.mkdir()
    torch.save(model.state_dict(), out / "pytorch_model_fsdp.bin")
    torch.save(get_optimizer_state_dict(model, optimizer), out / "optimizer.bin")
    torch.save(optimizer_truth(model, optimizer), out.with_suffix(".truth.pt"))


def in_distcp(folder: Path, out: Path) -> None:
    """A folder of the Trainer whose model and optimizer FSDP saved: Accelerate makes the two folders so."""
    model = model_of("llama").train()
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=INPUT, labels=INPUT).loss.backward()
    optimizer.step()
    out.mkdir()
    for file in folder.iterdir():
        if not file.name.startswith(("model", "optimizer")):
            (out / file.name).write_bytes(file.read_bytes())
    for name, state in {
        "pytorch_model_fsdp_0": {"model": model.state_dict()},
        "optimizer_0": {"optimizer": get_optimizer_state_dict(model, optimizer)},
    }.items():
        save(state, checkpoint_id=out / name, no_dist=True)
    torch.save(optimizer_truth(model, optimizer), out.with_suffix(".truth.pt"))


def on_ranks(rank: int, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}/rendezvous", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    whole = {
        "rows": torch.randn(7, 6),
        "columns": torch.randn(4, 5, dtype=torch.bfloat16),
        "same": torch.randn(3),
        "plain": torch.randn(2, 2),
        "scalar": torch.tensor(2.5),
        "short": torch.randn(1, 8),  # the second rank holds none of it
    }
    if rank == 0:
        torch.save(whole, out / "ranks.truth.pt")
    cuts = {"rows": Shard(0), "columns": Shard(1), "same": Replicate(), "short": Shard(0)}
    state = {k: distribute_tensor(v, mesh, [cuts[k]]) if k in cuts else v for k, v in whole.items()}
    for name, files in (("ranks", None), ("consolidated", {k: 1 + (k > "rows") for k in state})):
        writer = HuggingFaceStorageWriter(
            str(out / name),
            fqn_to_index_mapping=files,
            save_distributed=True,
            enable_consolidation=name == "consolidated",
        )
        save(state, storage_writer=writer)
    dist.destroy_process_group()


def deepspeed(out: Path) -> None:
    import deepspeed
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__ = {}  # see `engines.ranks.join_deepspeed`
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29547")
    model = model_of("llama_tied").train()
    config = {
        "train_batch_size": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for _ in range(2):
        engine.backward(engine(input_ids=INPUT, labels=INPUT).loss)
        engine.step()
    engine.save_checkpoint(str(out), tag="step")
    model.config.save_pretrained(out.with_name("deepspeed.config"))
    torch.save(truth_of(engine.module), out.with_suffix(".truth.pt"))
    dist.destroy_process_group()


def main() -> None:
    torch.set_num_threads(1)
    out = Path(sys.argv[1])
    for part in ("models", "sharded", "truth", "trainer"):
        (out / part).mkdir(parents=True)
    for name in MODELS:
        model = model_of(name)
        model.save_pretrained(out / "models" / name)
        model.save_pretrained(out / "sharded" / name, max_shard_size=SHARD)
        torch.save(truth_of(model), out / "truth" / f"{name}.pt")
    for name in ("llama_tied", "gpt2", "qwen3"):
        train(model_of(name), out / "trainer" / name)
    adapted = get_peft_model(model_of("llama"), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    train(adapted, out / "peft")
    accelerated(["llama"], out / "accelerate")
    accelerated(["gpt2", "mistral"], out / "two")
    in_bins(out / "bin")
    fsdp_full(out / "fsdp_full")
    in_distcp(out / "trainer" / "qwen3" / f"checkpoint-{STEPS}", out / "distcp")
    mp.start_processes(on_ranks, (out,), 2, start_method="fork")
    if "deepspeed" in sys.argv[2:]:
        deepspeed(out / "deepspeed")


if __name__ == "__main__":
    main()
