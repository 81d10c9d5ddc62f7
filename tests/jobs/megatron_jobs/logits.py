"""What Megatron core computes, of models of its own and of weights that we translated.

`logits.py save OUT`: of each of `FAMILIES`, a legacy checkpoint OUT/NAME and OUT/NAME.logits.pt.
`logits.py load JOBS`: each job of the JSON list is `{"weights", "logits"}`: a legacy file of one rank, and where to
write what the model of its arguments computes with its weights.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils

from engines import ranks
from megatron_jobs import without_cuda
from megatron_jobs.families import FAMILIES

INPUT = (torch.arange(24) * 7 % 64).reshape(2, 12)


def model_of(args: argparse.Namespace) -> GPTModel:
    """The model that megatron.training would build of these arguments."""
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups if args.group_query_attention else None,
        kv_channels=args.kv_channels,
        gated_linear_unit=args.swiglu,
        activation_func=torch.nn.functional.silu if args.swiglu else torch.nn.functional.gelu,
        bias_activation_fusion=args.bias_gelu_fusion and not args.swiglu,
        add_bias_linear=args.add_bias_linear,
        add_qkv_bias=args.add_qkv_bias,
        qk_layernorm=args.qk_layernorm,
        normalization=args.normalization,
        layernorm_epsilon=args.layernorm_epsilon,
        num_moe_experts=args.num_experts,
        moe_router_topk=args.moe_router_topk,
        moe_ffn_hidden_size=args.moe_ffn_hidden_size,
        window_size=args.window_size,
        rotary_interleaved=args.rotary_interleaved,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )
    spec = get_gpt_layer_local_spec(
        num_experts=args.num_experts, qk_layernorm=args.qk_layernorm, normalization=args.normalization
    )
    model = GPTModel(
        config,
        spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
    )
    return model.eval()


def logits_of(model: GPTModel) -> torch.Tensor:
    count, length = INPUT.shape
    positions = torch.arange(length).expand(count, length)
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    with torch.no_grad():
        logits: torch.Tensor = model(INPUT, positions, mask)
    return logits


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
        torch.save(logits_of(model)[..., : args.vocab_size + 1], out / f"{name}.logits.pt")


def in_plain_layers(name: str) -> str:
    """Transformer Engine, which is not here, has norms inside the projections that follow."""
    name = name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
    return name.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")


def load(jobs: Path) -> None:
    for job in json.loads(jobs.read_text()):
        root = torch.load(job["weights"], weights_only=False)
        model = model_of(root["args"])
        weights = {in_plain_layers(name): tensor for name, tensor in root["model"].items()}
        missing, unexpected = model.load_state_dict(weights, strict=False)
        left = [name for name in missing if not name.endswith("_extra_state")]
        tied = [] if root["args"].untie_embeddings_and_output_weights else ["output_layer.weight"]
        assert (left, unexpected) in (([], []), (tied, []), ([], tied)), (job, left, unexpected)
        torch.save(logits_of(model), job["logits"])


def run(what: str, path: Path) -> None:
    parallel_state.initialize_model_parallel(1, 1)
    tensor_parallel.random.initialize_rng_tracker(use_cudagraphable_rng=False)
    # Dropout is off, so nothing is drawn from CUDA's random states, which are not there.
    tensor_parallel.get_cuda_rng_tracker().fork = lambda *_: nullcontext()
    moe_utils.te_general_gemm = None  # asked for, but never defined, where Transformer Engine is not installed
    {"save": save, "load": load}[what](path)


if __name__ == "__main__":
    without_cuda.pretend()
    torch.set_num_threads(1)
    path = Path(sys.argv[2])
    ranks.run(1, partial(run, sys.argv[1], path), path.parent / "logs", 300, ranks.join_torch)
