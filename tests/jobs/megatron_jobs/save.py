"""Run kinds of Megatron core and save them: `save.py FOLDER KIND...`.

Each makes FOLDER/KIND with what Megatron's own code wrote:

    legacy/iter_0000002/mp_rank_.../   the files of --ckpt-format torch, as megatron.training names them
    fully/, dp/, plain/                distributed checkpoints, by the encoding of the optimizer
    truth.pt                           what Megatron itself reads of them: {key: whole tensor}
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import sys
import zlib
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from engines import ranks
from megatron_jobs import without_cuda
from megatron_jobs.kinds import KINDS, Kind
from megatron_jobs.predictions import allow_plain_latent_attention

STEPS = 2
FURTHER = (
    "multi_latent_attention",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "rope_type",
    "qk_layernorm",
    "moe_layer_freq",
    "moe_router_enable_expert_bias",
    "mtp_num_layers",
)
"""Fields of the model's configuration that are arguments of the same name. The width of shared experts is left out."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def config_of(kind: Kind) -> TransformerConfig:
    config_class = MLATransformerConfig if kind.model.get("multi_latent_attention") else TransformerConfig
    return config_class(
        **kind.model,
        **kind.more,
        tensor_model_parallel_size=kind.tp,
        pipeline_model_parallel_size=kind.pp,
        virtual_pipeline_model_parallel_size=kind.vpp,
        expert_model_parallel_size=kind.ep,
        bf16=kind.dtype == "bf16",
        fp16=kind.dtype == "fp16",
        params_dtype=DTYPES[kind.dtype],
        pipeline_dtype=DTYPES[kind.dtype],
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        persist_layer_norm=False,
        activation_func=torch.nn.functional.silu if kind.model.get("gated_linear_unit") else torch.nn.functional.gelu,
    )


def specs_of(kind: Kind, config: TransformerConfig, stage: int | None) -> tuple[Any, Any]:
    """The plain layers of a model chunk, and those for multi-token prediction."""
    if not isinstance(config, MLATransformerConfig):
        experts, norm = kind.model.get("num_moe_experts"), kind.model["normalization"]
        return get_gpt_layer_local_spec(num_experts=experts, moe_grouped_gemm=False, normalization=norm), None
    allow_plain_latent_attention()
    options = {"use_transformer_engine": False, "vp_stage": stage}
    layers = get_gpt_decoder_block_spec(config, normalization=kind.model["normalization"], **options)
    return layers, get_gpt_mtp_block_spec(config, layers, **options)


def build(kind: Kind, config: TransformerConfig) -> list[GPTModel]:
    """The model chunks of this rank."""
    first, last = parallel_state.is_pipeline_first_stage, parallel_state.is_pipeline_last_stage
    models = []
    for chunk in range(kind.vpp or 1):
        stage = chunk if kind.vpp else None
        spec, mtp_spec = specs_of(kind, config, stage)
        model = GPTModel(
            config,
            spec,
            vocab_size=kind.vocabulary,
            max_sequence_length=16,
            pre_process=first(ignore_virtual=False, vp_stage=stage) if kind.vpp else first(),
            post_process=last(ignore_virtual=False, vp_stage=stage) if kind.vpp else last(),
            share_embeddings_and_output_weights=kind.tied,
            position_embedding_type="learned_absolute" if kind.tied else "rope",
            mtp_block_spec=mtp_spec,
            vp_stage=stage,
        )
        models.append(model.to(DTYPES[kind.dtype]))
    return models


def in_model(name: str, model: GPTModel) -> str:
    """A parameter's name with the number that its layer has in the whole model."""
    if name.startswith("mtp."):
        return name

    def numbered(match: re.Match[str]) -> str:
        return f"layers.{model.decoder.layers[int(match[1])].layer_number}."

    return re.sub(r"layers\.(\d+)\.", numbered, name)


def fill(models: list[Any], kind: Kind, what: str) -> None:
    """Weights, or gradients, that depend on the tensor's name and on which part of it a rank has; copies are equal."""
    for chunk in models:
        model = chunk.module if what == "gradients" else chunk
        for name, parameter in model.named_parameters():
            shared = name in ("output_layer.weight", "embedding.word_embeddings.weight") and kind.tied
            cut = getattr(parameter, "tensor_model_parallel", False)
            expert = ".experts." in name
            rank = parallel_state.get_tensor_model_parallel_rank() if cut else 0
            place = (
                "table" if shared else in_model(name, model),
                what,
                rank,
                parallel_state.get_expert_model_parallel_rank() if expert else 0,
            )
            generator = torch.Generator().manual_seed(zlib.crc32(repr(place).encode()))
            values = torch.randn(parameter.shape, generator=generator) * 0.1
            if what == "gradients":
                parameter.main_grad.copy_(values) if hasattr(parameter, "main_grad") else None
            else:
                parameter.data.copy_(values)
        for name, buffer in model.named_buffers():
            if what == "weights" and name.endswith(".expert_bias"):
                generator = torch.Generator().manual_seed(zlib.crc32(in_model(name, model).encode()))
                buffer.data = torch.randn(buffer.shape, generator=generator)  # float32, as Megatron maintains it


def run(kind: Kind, out: Path) -> None:
    save(kind, *trained(kind), out)


def trained(kind: Kind, steps: int = STEPS) -> tuple[list[Any], Any, TransformerConfig]:
    """The wrapped chunks of this rank after some steps, their optimizer and their configuration."""
    parallel_state.initialize_model_parallel(
        kind.tp,
        kind.pp,
        virtual_pipeline_model_parallel_size=kind.vpp,
        expert_model_parallel_size=kind.ep,
        expert_tensor_parallel_size=kind.tp if kind.ep == 1 else 1,
    )
    tensor_parallel.random.initialize_rng_tracker(use_cudagraphable_rng=False)
    config = config_of(kind)
    models = build(kind, config)
    fill(models, kind, "weights")
    wrapped = [
        DistributedDataParallel(
            config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                overlap_grad_reduce=kind.bucket is not None,
                use_distributed_optimizer=kind.distributed,
                bucket_size=kind.bucket,
            ),
            model,
            disable_bucketing=i > 0,
        )
        for i, model in enumerate(models)
    ]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            weight_decay=0.1,
            bf16=kind.dtype == "bf16",
            fp16=kind.dtype == "fp16",
            **kind.scaler,
            params_dtype=DTYPES[kind.dtype],
            use_distributed_optimizer=kind.distributed,
            clip_grad=0.0,
            overlap_param_gather=False,
        ),
        wrapped,
    )
    for _ in range(steps):
        fill(wrapped, kind, "gradients")
        optimizer.step()
    return wrapped, optimizer, config


def arguments(kind: Kind, config: TransformerConfig) -> argparse.Namespace:
    """What megatron.training would have parsed, as far as it says how things are cut."""
    latent = {name: kind.model.get(name) for name in FURTHER if name in kind.model}
    return argparse.Namespace(
        **latent,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.ffn_hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_query_groups,
        group_query_attention=config.num_query_groups != config.num_attention_heads,
        kv_channels=config.kv_channels,
        swiglu=config.gated_linear_unit,
        add_bias_linear=config.add_bias_linear,
        untie_embeddings_and_output_weights=not kind.tied,
        padded_vocab_size=kind.vocabulary,
        tensor_model_parallel_size=kind.tp,
        pipeline_model_parallel_size=kind.pp,
        virtual_pipeline_model_parallel_size=kind.vpp,
        expert_model_parallel_size=kind.ep,
        expert_tensor_parallel_size=kind.tp if kind.ep == 1 else 1,
        context_parallel_size=1,
        data_parallel_size=kind.dp,
        world_size=kind.world,
        decoder_first_pipeline_num_layers=config.num_layers_in_first_pipeline_stage,
        decoder_last_pipeline_num_layers=config.num_layers_in_last_pipeline_stage,
        num_experts=config.num_moe_experts,
        moe_ffn_hidden_size=config.moe_ffn_hidden_size,
        moe_grouped_gemm=False,
        transformer_impl="local",
        use_distributed_optimizer=kind.distributed,
        overlap_grad_reduce=kind.bucket is not None,
        ddp_bucket_size=kind.bucket,
        bf16=kind.dtype == "bf16",
        fp16=kind.dtype == "fp16",
        rank=torch.distributed.get_rank(),
    )


def save(kind: Kind, models: list[Any], optimizer: Any, config: TransformerConfig, out: Path) -> None:
    args = arguments(kind, config)
    common = {"args": args, "checkpoint_version": 3.0, "iteration": STEPS}
    save_legacy(kind, models, optimizer, common, out / "legacy")
    encodings = {"fully": "fully_reshardable", "dp": "dp_reshardable", "zero": "dp_zero_gather_scatter"}
    for folder, encoding in (encodings if kind.distributed else {"plain": None}).items():
        save_dist(models, optimizer, common, out / folder, encoding, kind.wrapped)
    torch.distributed.barrier()
    whole = dist_checkpointing.load_plain_tensors(str(iteration(out / ("fully" if kind.distributed else "plain"))))
    if torch.distributed.get_rank() == 0:
        torch.save(whole, out / "truth.pt")


def iteration(run: Path) -> Path:
    return run / f"iter_{STEPS:07d}"


def save_dist(
    models: list[Any], optimizer: Any, common: dict[str, Any], run: Path, encoding: str | None, wrapped: bool
) -> None:
    fork_results_queue()
    state = sharded(models, optimizer, common, encoding, wrapped)
    if torch.distributed.get_rank() == 0:
        iteration(run).mkdir(parents=True)
        (run / "latest_checkpointed_iteration.txt").write_text(str(STEPS))
    torch.distributed.barrier()
    content_metadata = {key: value for key, value in metadata_of(encoding).items() if key != "dp_cp_group"}
    dist_checkpointing.save(state, str(iteration(run)), content_metadata=content_metadata)


def fork_results_queue() -> None:
    """Fork the process of the queue to which Megatron's writers report, which Megatron itself spawns in each rank.

    A spawned process imports this script, torch and Megatron again, for seconds. The queue is of the same class.
    """
    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = multiprocessing.get_context("fork").Manager().Queue()


def metadata_of(encoding: str | None) -> dict[str, Any]:
    """What Megatron is told of how to save."""
    metadata: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return metadata if encoding is None else {**metadata, "distrib_optim_sharding_type": encoding}


def sharded(
    models: list[Any],
    optimizer: Any,
    common: dict[str, Any],
    encoding: str | None,
    wrapped: bool,
    is_loading: bool = False,
) -> dict[str, Any]:
    """The state of this rank as Megatron saves it, and loads into it: with the place of each shard."""
    metadata = metadata_of(encoding)
    names = ["model"] if len(models) == 1 else [f"model{i}" for i in range(len(models))]
    if not wrapped:
        models = [model.module for model in models]
    model = {name: one.sharded_state_dict(metadata=metadata) for name, one in zip(names, models, strict=True)}
    rng = random_states([{"torch_rng_state": torch.get_rng_state()}])
    state = {**common, **model} if is_loading else {**common, **model, "rng_state": rng}
    state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=metadata)
    return state


def random_states(own: Any) -> ShardedObject:
    """A rank's random states. With experts on several ranks, each data-parallel rank has its own."""
    place = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()
    counts = (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    dp = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    if parallel_state.get_expert_model_parallel_world_size() > 1:
        together = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        return ShardedObject("rng_state", own, (*counts, together), (*place, dp))
    return ShardedObject("rng_state", own, counts, place, replica_id=dp)


def save_legacy(kind: Kind, models: list[Any], optimizer: Any, common: dict[str, Any], run: Path) -> None:
    """As megatron.training does it, which is not in the package: the same calls, the same names."""
    numbers = [f"{parallel_state.get_tensor_model_parallel_rank():02d}"]
    if kind.pp > 1:
        numbers.append(f"{parallel_state.get_pipeline_model_parallel_rank():03d}")
    if kind.ep > 1:
        numbers.append(f"{parallel_state.get_expert_model_parallel_rank():03d}")
    folder = iteration(run) / "_".join(["mp_rank", *numbers])
    folder.mkdir(parents=True, exist_ok=True)
    if kind.distributed:
        optimizer.save_parameter_state(str(folder / "distrib_optim.pt"))  # all of them together
    if parallel_state.get_expert_data_parallel_rank() == 0:
        chunks = [model.state_dict_for_save_checkpoint() for model in models]
        state = dict(common)
        state |= {"model": chunks[0]} if len(chunks) == 1 else {f"model{i}": one for i, one in enumerate(chunks)}
        state["optimizer"] = optimizer.state_dict()
        state["rng_state"] = [{"torch_rng_state": torch.get_rng_state()}]
        torch.save(state, folder / "model_optim_rng.pt")
    if torch.distributed.get_rank() == 0:
        (run / "latest_checkpointed_iteration.txt").write_text(str(STEPS))


if __name__ == "__main__":
    without_cuda.pretend()
    out = Path(sys.argv[1])
    for name in sys.argv[2:]:
        kind = KINDS[name]
        ranks.run(kind.world, partial(run, kind, out / name), out / name / "logs", 120, ranks.join_torch)
