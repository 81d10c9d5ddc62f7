"""A live training of a kind: two micro-batches a step, clipping, a schedule, two groups with their own weight decay."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from ckpt_recorder import int8, topk
from ckpt_recorder.gradient_compression import GradientCompression
from recording_jobs.kinds import MIDDLE, Kind
from recording_jobs.model import BATCH, Decoder, Expert, Stage, batch

RATE, BETAS, DECAY, CLIP, MICRO_BATCHES = 4e-3, (0.9, 0.95), 0.1, 0.5, 2
SKIPPED = (3, 6)
"""The steps at which fp16 overflows, where there is a scaler."""
PARTS = ("pipeline", "experts")
"""The engines whose ranks have other parameters each, so that no group of the optimizer has all names."""
_CUT = {"q": ColwiseParallel, "k": ColwiseParallel, "v": ColwiseParallel, "out": RowwiseParallel} | {
    "up": ColwiseParallel,
    "down": RowwiseParallel,
}


@dataclass
class Run:
    """By torch's own wrappers."""

    kind: Kind
    model: Any
    optimizer: torch.optim.Optimizer
    scheduler: LambdaLR
    scaler: torch.amp.GradScaler | None
    compression: GradientCompression | None = None
    step: int = 0
    """How many batches were taken, those whose step was skipped among them."""

    def train(self, steps: int) -> list[float]:
        """Train on the batches that follow; the losses, averaged over the ranks."""
        losses = []
        for _ in range(steps):
            for number, part in enumerate(_share(self.step, self.kind)):
                if isinstance(self.model, DistributedDataParallel):
                    self.model.require_backward_grad_sync = number == MICRO_BATCHES - 1
                loss = self.model(part, self.step % 2 == 0) / MICRO_BATCHES
                if self.scaler is not None:
                    overflow = float("inf") if self.step in SKIPPED else 1.0
                    loss = self.scaler.scale(loss * overflow)
                loss.backward()
                losses.append(loss.detach())
            if self.scaler is None:
                if self.kind.engine == "fsdp1":
                    self.model.clip_grad_norm_(CLIP)
                elif self.kind.tp == 1:  # tensors on several meshes have no norm in common
                    nn.utils.clip_grad_norm_(self.model.parameters(), CLIP, foreach=False)
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.step += 1
        return _means(losses)

    def evaluate(self) -> None:
        """Run forward alone, after which FSDP has full parameters in its outermost module."""
        self.model.eval()
        with torch.no_grad():
            self.model(batch(self.step), True)
        self.model.train()

    def notes(self) -> dict[str, Any]:
        """What else resumes with a step."""
        # The residuals are averaged over the ranks when they are noted, so that changes what follows.
        compression = self.compression if self.step in (0, MIDDLE) else None
        others = {"scaler": self.scaler, "compression": compression}
        return {"scheduler": self.scheduler, "step": self.step} | {k: v for k, v in others.items() if v is not None}

    def save(self, folder: Path) -> None:
        dcp.save(self._tree(), checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        tree = self._tree()
        # If a rank of FSDP1 has no row of a tensor, torch 2.13 takes any checkpoint for one of an old version.
        dcp.load(tree, checkpoint_id=folder, planner=dcp.DefaultLoadPlanner(flatten_sharded_tensors=False))
        set_state_dict(self.model, self.optimizer, model_state_dict=tree["model"], optim_state_dict=tree["optim"])
        self.scheduler.load_state_dict({**self.scheduler.state_dict(), **tree["scheduler"]})
        self.step = tree["step"]
        if self.scaler is not None:
            self.scaler.load_state_dict(tree["scaler"])
        if self.compression is not None:
            self.compression.load_state_dict(tree["compression"])

    def _tree(self) -> dict[str, Any]:
        by_parameter = StateDictOptions(flatten_optimizer_state_dict=self.kind.engine in PARTS)
        model, optimizer = get_state_dict(self.model, self.optimizer, options=by_parameter)
        notes = {name: one.state_dict() if hasattr(one, "state_dict") else one for name, one in self.notes().items()}
        return {"model": model, "optim": optimizer, **notes}


@dataclass
class DividedRun(Run):
    """With an optimizer that is divided among the ranks, which rank 0 saves in a file of torch."""

    optimizer: ZeroRedundancyOptimizer

    def save(self, folder: Path) -> None:
        self.optimizer.consolidate_state_dict()
        if distributed.get_rank() == 0:
            torch.save({"model": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict()}, folder)


@dataclass
class PipelineRun(Run):
    """By torch's pipeline: two stages, each copied over the ranks of its group."""

    def train(self, steps: int) -> list[float]:
        stage = PipelineStage(
            self.model, self.is_last, 2, torch.device("cpu"), group=_mesh(self.kind)["pp"].get_group()
        )
        schedule = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=_loss)
        losses: list[Tensor] = []
        for _ in range(steps):
            mine = batch(self.step).chunk(self.kind.dp)[distributed.get_rank() // self.kind.pp]
            if self.is_last:
                self.model.module.with_sometimes = self.step % 2 == 0
                of_step: list[Tensor] = []
                schedule.step(target=mine, losses=of_step)
                losses += (loss.detach() / MICRO_BATCHES for loss in of_step)
            else:
                schedule.step(mine)
                losses += [torch.zeros(())] * MICRO_BATCHES
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.step += 1
        return _means(losses)

    @property
    def is_last(self) -> int:
        return distributed.get_rank() % self.kind.pp


@dataclass
class ExpertRun(Run):
    """Each rank has an expert of its own, and copies of all other weights."""

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            for part in _share(self.step, self.kind):
                loss = self.model(part, self.step % 2 == 0) / MICRO_BATCHES
                loss.backward()
                losses.append(loss.detach())
            for parameter in self.model.whole.parameters():
                if parameter.grad is not None:
                    distributed.all_reduce(parameter.grad)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.step += 1
        return _means(losses)


def _loss(output: Tensor, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), tokens[:, 1:].flatten())


@dataclass
class EngineRun:
    """By DeepSpeed."""

    kind: Kind
    model: Any
    optimizer: None = None

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            step = self.model.global_steps
            for part in _share(step, self.kind):
                loss = self.model(part, step % 2 == 0)
                self.model.backward(loss)
                self.model.step()
                losses.append(loss.detach() / MICRO_BATCHES)
        return _means(losses)

    def notes(self) -> dict[str, Any]:
        return {}

    def save(self, folder: Path) -> None:
        self.model.save_checkpoint(str(folder), tag=f"global_step{self.model.global_steps}")

    def load(self, folder: Path) -> None:
        loaded, _ = self.model.load_checkpoint(str(folder))
        assert loaded is not None


@dataclass
class ZooRun:
    """By DeepSpeed, of a model of `engines`."""

    run: Any
    optimizer: None = None

    @property
    def model(self) -> Any:
        return self.run.engine

    def train(self, steps: int) -> list[float]:
        losses: list[float] = self.run.train(steps)
        return losses

    def notes(self) -> dict[str, Any]:
        return {}

    def save(self, folder: Path) -> None:
        self.model.save_checkpoint(str(folder), tag=f"global_step{self.model.global_steps}")


def start(kind: Kind, seed: int = 0) -> Any:
    """Build it all; another `seed` gives other weights, frozen ones and buffers included."""
    torch.set_num_threads(kind.threads)
    torch.manual_seed(seed)
    if kind.engine == "megatron":
        from recording_jobs import megatron_run

        return megatron_run.start(kind)
    if kind.zoo:
        from engines import kinds, run

        return ZooRun(run.start(kinds.KINDS[kind.zoo]))
    model = Decoder(kind.tied)
    if seed:
        model.drift.zero_()
    matrices = {name for name, parameter in model.named_parameters() if parameter.dim() > 1}
    if kind.engine == "deepspeed":
        if kind.dtype == "fp16":
            # DeepSpeed refuses a processor without fp16 instructions; torch computes in fp16 on any.
            import deepspeed.accelerator

            deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
        return EngineRun(kind, _engine(kind, model, matrices))
    wrapped = _wrapped(kind, model)
    optimizer = _optimizer(kind, _groups(wrapped if kind.engine in (*PARTS, "fsdp1") else model, matrices))
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 6))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2) if kind.scaler else None
    compression = {"topk": topk(0.01), "int8": int8()}.get(kind.compression)
    if compression is not None:
        compression.register(wrapped)
    runs = {"pipeline": PipelineRun, "experts": ExpertRun}
    return (DividedRun if kind.divided else runs.get(kind.engine, Run))(
        kind, wrapped, optimizer, scheduler, scaler, compression
    )


def _share(step: int, kind: Kind) -> tuple[Tensor, ...]:
    """The micro-batches of a step for this rank: over all ranks the same at every degree."""
    place = distributed.get_rank() // kind.tp % kind.dp
    return tuple(part.chunk(kind.dp)[place] for part in batch(step).chunk(MICRO_BATCHES))


def _means(losses: list[Tensor]) -> list[float]:
    """Of each step, over micro-batches and ranks."""
    sums = torch.stack(losses).double().reshape(-1, MICRO_BATCHES).sum(1)
    distributed.all_reduce(sums)
    return (sums / distributed.get_world_size()).tolist()


def _groups(model: nn.Module, matrices: set[str]) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = [{"params": [], "weight_decay": decay} for decay in (DECAY, 0.0)]
    for wrapped, parameter in model.named_parameters():
        name = wrapped.replace("_fsdp_wrapped_module.", "")
        if parameter.requires_grad:
            groups[not name.endswith(tuple(matrices))]["params"].append(parameter)
    return [group for group in groups if group["params"]]


def _optimizer(kind: Kind, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    sgd = {"lr": 0.05, "momentum": 0.9, "nesterov": True, "foreach": False}
    adam = {"lr": RATE, "betas": BETAS, **({"fused": True} if kind.optimizer == "adamw-fused" else {"foreach": False})}
    if kind.divided:
        inner, options = (torch.optim.SGD, sgd) if kind.optimizer == "sgd" else (torch.optim.AdamW, adam)
        return ZeroRedundancyOptimizer(groups, inner, parameters_as_bucket_view=True, **options)
    if kind.optimizer == "sgd":
        return torch.optim.SGD(groups, **sgd)
    if kind.optimizer == "cpu-adam":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(groups, lr=RATE, betas=BETAS)
    return torch.optim.AdamW(groups, **adam)


def _wrapped(kind: Kind, model: Decoder) -> nn.Module:
    if kind.engine == "plain":
        return model
    if kind.engine == "ddp":
        return DistributedDataParallel(model, find_unused_parameters=True)
    if kind.engine == "fsdp1":
        return _fsdp1(kind, model)
    if kind.engine == "experts":
        return Expert(model, distributed.get_rank())
    if kind.engine == "pipeline":
        mesh = _mesh(kind)
        stage = Stage(model, mesh["pp"].get_local_rank() == 0)
        return DistributedDataParallel(stage, process_group=mesh["dp"].get_group(), find_unused_parameters=True)
    sizes = {"replicas": kind.replicas, "shards": kind.shards, "tp": kind.tp}
    kept = {name: size for name, size in sizes.items() if size > 1 or name == "shards"}
    mesh = init_device_mesh("cpu", tuple(kept.values()), mesh_dim_names=tuple(kept))
    if kind.tp > 1:
        if kind.engine == "tp":
            whole = {"input_layouts": Replicate(), "output_layouts": Replicate()}
            parallelize_module(model.words, mesh["tp"], RowwiseParallel(**whole))
            parallelize_module(model.head, mesh["tp"], ColwiseParallel(**whole))
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], {name: style() for name, style in _CUT.items()})
    if kind.engine == "tp":
        return model
    data = mesh[("replicas", "shards")] if kind.replicas > 1 else mesh["shards"]
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if kind.mixed else MixedPrecisionPolicy()
    for block in model.blocks:
        fully_shard(block, mesh=data, mp_policy=policy)
    return fully_shard(model, mesh=data, mp_policy=policy)


def _fsdp1(kind: Kind, model: Decoder) -> nn.Module:
    """Modules in modules, one of them frozen, and weights that FSDP1 ignores, in mixed precision; buffers, too."""
    bf16 = torch.bfloat16
    options: dict[str, Any] = {
        "sharding_strategy": ShardingStrategy[kind.strategy],
        "use_orig_params": not kind.flat,
        "mixed_precision": MixedPrecision(param_dtype=bf16, reduce_dtype=bf16, buffer_dtype=bf16),
        "device_id": torch.device("cpu"),
    }
    if kind.replicas > 1:
        options["device_mesh"] = init_device_mesh("cpu", (kind.replicas, kind.shards))
    if kind.flat:  # a flat parameter is frozen as a whole
        options["ignored_states"] = [model.positions.bfloat16().weight]
        model.sometimes = FSDP(model.sometimes.requires_grad_(False), **options)
    for number, block in enumerate(model.blocks):
        model.blocks[number] = FSDP(block, **options)
    return FSDP(model, **options)


@cache
def _mesh(kind: Kind) -> DeviceMesh:
    """The ranks of a pipeline: the stages of a copy are neighbours."""
    return init_device_mesh("cpu", (kind.dp, kind.pp), mesh_dim_names=("dp", "pp"))


def _engine(kind: Kind, model: nn.Module, matrices: set[str]) -> Any:
    import deepspeed

    zero: dict[str, Any] = {"stage": kind.stage, "parameter_alignment": kind.stage == 2}
    if kind.stage == 3:
        # Several parts a step; small parameters stay whole on every rank, large ones do not.
        zero |= {"sub_group_size": kind.sub_group, "stage3_param_persistence_threshold": 100}
    if kind.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    power, window = kind.loss_scale
    overflowing = {"initial_scale_power": power, "loss_scale_window": window, "hysteresis": 1}
    config = {
        "train_micro_batch_size_per_gpu": BATCH // kind.dp // MICRO_BATCHES,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": CLIP,
        "steps_per_print": 10**6,
        kind.dtype: {"enabled": True, **(overflowing if kind.dtype == "fp16" else {})},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": RATE / 10, "warmup_max_lr": RATE, "warmup_num_steps": 6},
        },
    }
    if kind.fp32_sums:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    optimizer = _optimizer(kind, _groups(model, matrices))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine
