"""What Megatron core computes, of models of its own and of weights that we translated.

`logits.py save OUT`: of each of `FAMILIES`, a legacy checkpoint OUT/NAME and OUT/NAME.logits.pt.
`logits.py load JOBS`: each job of the JSON list is `{"weights", "logits"}`: a legacy file of one rank, and where to
write what the model of its arguments computes with its weights.
`logits.py split JOBS`: each job is `{"folder", "logits"}`: the folder of one step, whose ranks load their own files.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.moe import moe_utils

from engines import ranks
from megatron_jobs import without_cuda
from megatron_jobs.families import FAMILIES, INPUT
from megatron_jobs.predictions import allow_plain_latent_attention, with_predictions


def config_of(args: argparse.Namespace) -> TransformerConfig:
    """What `core_transformer_config_from_args` of Megatron-LM makes of arguments.

    A field has the value of the argument of its name, but for those below. What only trains or only runs on GPUs is
    set to what a CPU can do.
    """
    kind = MLATransformerConfig if getattr(args, "multi_latent_attention", False) else TransformerConfig
    fields = {f.name: getattr(args, f.name) for f in dataclasses.fields(kind) if hasattr(args, f.name)}
    gated = args.swiglu or getattr(args, "quick_geglu", False)
    activation = quick_gelu if getattr(args, "quick_geglu", False) else torch.nn.functional.silu
    fields |= {
        "num_moe_experts": args.num_experts,
        "pipeline_dtype": args.params_dtype if hasattr(args, "params_dtype") else None,
        "layernorm_epsilon": getattr(args, "norm_epsilon", args.layernorm_epsilon),
        "num_query_groups": args.num_query_groups if args.group_query_attention else None,
        "gated_linear_unit": gated,
        "activation_func": activation if gated else torch.nn.functional.gelu,
        "bias_activation_fusion": args.bias_gelu_fusion and not gated,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "allgather",
        "moe_grouped_gemm": False,
    }
    if kind is MLATransformerConfig:
        fields.setdefault("q_lora_rank", None)  # the default of Megatron-LM's parser, not that of the class
    config = kind(**fields)
    for name, value in vars(args).items():
        if name.startswith("yarn_"):  # no fields: the model asks its configuration for these attributes
            setattr(config, name, value)
    return config


def model_of(args: argparse.Namespace) -> GPTModel:
    """The stage of this rank of the model that megatron.training would build of these arguments, in plain layers."""
    config = config_of(args)
    if isinstance(config, MLATransformerConfig):
        allow_plain_latent_attention()
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=args.normalization)
    predictions = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if config.mtp_num_layers else None
    model = GPTModel(
        config,
        spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        mtp_block_spec=predictions,
    )
    return model.eval()


def logits_of(model: GPTModel) -> torch.Tensor | None:
    """What the whole model computes, on the last stage; None on others. Stages hand on what they have."""
    tokens = torch.tensor(INPUT)
    count, length = tokens.shape
    positions = torch.arange(length).expand(count, length)
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    with torch.no_grad():
        if not model.pre_process:
            received = torch.empty(length, count, model.config.hidden_size)
            dist.recv(received, parallel_state.get_pipeline_model_parallel_prev_rank())
            model.set_input_tensor([received])
        result = (partial(with_predictions, model) if model.mtp_process else model)(
            tokens, positions, mask
        ).contiguous()
        if not model.post_process:
            dist.send(result, parallel_state.get_pipeline_model_parallel_next_rank())
            return None
    parts = [torch.empty_like(result) for _ in range(model.config.tensor_model_parallel_size)]
    dist.all_gather(parts, result, parallel_state.get_tensor_model_parallel_group())
    return torch.cat(parts, -1)


def save(out: Path) -> None:
    for name, arguments in FAMILIES.items():
        torch.manual_seed(len(name))
        args = argparse.Namespace(**arguments)
        model = model_of(args)
        with torch.no_grad():
            for parameter in model.parameters():  # norms and biases, too, are no constants
                parameter.add_(torch.randn_like(parameter) * 0.05)
        folder = out / name / "iter_0000002" / "mp_rank_00"
        folder.mkdir(parents=True)
        root = {
            "args": args,
            "checkpoint_version": 3.0,
            "iteration": 2,
            "model": model.state_dict_for_save_checkpoint(),
        }
        torch.save(root, folder / "model_optim_rng.pt")
        (out / name / "latest_checkpointed_iteration.txt").write_text("2")
        logits = logits_of(model)
        assert logits is not None
        torch.save(logits[..., : args.vocab_size + 1], out / f"{name}.logits.pt")


def in_plain_layers(name: str) -> str:
    """Transformer Engine, which is not here, has norms inside the projections that follow."""
    name = name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
    name = name.replace("self_attention.linear_q_up_proj.layer_norm_", "self_attention.q_layernorm.")
    name = name.replace("self_attention.linear_kv_up_proj.layer_norm_", "self_attention.kv_layernorm.")
    return name.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")


def load_strictly(model: GPTModel, root: dict[str, Any]) -> None:
    weights = {in_plain_layers(name): tensor for name, tensor in root["model"].items()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    left = [name for name in missing if not name.endswith("_extra_state")]
    tied = [] if root["args"].untie_embeddings_and_output_weights else ["output_layer.weight"]
    assert (left, unexpected) in (([], []), (tied, []), ([], tied)), (left, unexpected)


def load(jobs: Path) -> None:
    for job in json.loads(jobs.read_text()):
        root = torch.load(job["weights"], weights_only=False)
        model = model_of(root["args"])
        load_strictly(model, root)
        torch.save(logits_of(model), job["logits"])


def load_own(job: dict[str, str], args: argparse.Namespace) -> None:
    """As one of the ranks that the arguments state."""
    join(args)
    numbers = [f"{parallel_state.get_tensor_model_parallel_rank():02d}"]
    if args.pipeline_model_parallel_size > 1:
        numbers.append(f"{parallel_state.get_pipeline_model_parallel_rank():03d}")
    if args.expert_model_parallel_size > 1:
        numbers.append(f"{parallel_state.get_expert_model_parallel_rank():03d}")
    file = Path(job["folder"]) / "_".join(["mp_rank", *numbers]) / "model_optim_rng.pt"
    root = torch.load(file, weights_only=False)
    model = model_of(root["args"])
    load_strictly(model, root)
    logits = logits_of(model)
    if logits is not None and dist.get_rank() == dist.get_world_size() - 1:
        torch.save(logits, job["logits"])


def split(jobs: Path) -> None:
    for job in json.loads(jobs.read_text()):
        file = min(Path(job["folder"]).rglob("model_optim_rng.pt"))
        args = torch.load(file, weights_only=False, mmap=True)["args"]
        ranks.run(args.world_size, partial(load_own, job, args), jobs.parent / "logs", 120, ranks.join_torch)


def join(args: argparse.Namespace | None = None) -> None:
    degrees = ("tensor_model_parallel", "pipeline_model_parallel", "expert_model_parallel", "expert_tensor_parallel")
    sizes = {f"{one}_size": getattr(args, f"{one}_size", 1) for one in degrees}
    parallel_state.initialize_model_parallel(**sizes)
    tensor_parallel.random.initialize_rng_tracker(use_cudagraphable_rng=False)
    # Dropout is off, so nothing is drawn from CUDA's random states, which are not there.
    for module in (tensor_parallel, tensor_parallel.random):
        module.get_cuda_rng_tracker().fork = lambda *_: nullcontext()
    moe_utils.te_general_gemm = None  # asked for, but never defined, where Transformer Engine is not installed


def alone(work: Callable[[Path], None], path: Path) -> None:
    join()
    work(path)


def main() -> None:
    without_cuda.pretend()
    torch.set_num_threads(1)
    path = Path(sys.argv[2])
    if sys.argv[1] == "split":
        split(path)
    else:
        work = partial(alone, {"save": save, "load": load}[sys.argv[1]], path)
        ranks.run(1, work, path.parent / "logs", 300, ranks.join_torch)


if __name__ == "__main__":
    main()
