"""The arguments of a Megatron run: degrees of parallelism, and the sizes of the model.

Every file stores them as an `argparse.Namespace`. They are untrusted input, like the rest of the file.
If versions of Megatron use different names for one argument, each name is tried in turn.
"""

from dataclasses import dataclass
from pathlib import Path

from ckpt_formats.core.errors import CorruptError, IncompleteError, UnsupportedError
from ckpt_formats.core.values import Record, Value, is_natural


@dataclass(frozen=True)
class Arguments:
    """Typed look-ups in the run's arguments."""

    record: Record
    where: Path

    def number(self, *names: str, default: int | None = None) -> int:
        """The value of the first of these names that is set, else `default`.

        Raises `CorruptError` if the value is not a whole number, `IncompleteError` if there is neither a value nor a
        default.
        """
        value = self.optional(*names)
        if value is None:
            if default is None:
                raise IncompleteError(f"the arguments do not state `{names[0]}`", where=self.where)
            return default
        return value

    def optional(self, *names: str) -> int | None:
        """The value of the first of these names that is set, or None.

        Raises `CorruptError` if it is not a whole number.
        """
        value = next((v for v in map(self.record.get, names) if v is not None), None)
        if value is not None and not is_natural(value):
            raise CorruptError(
                f"the argument `{names[0]}` is {str(value)[:40]!r}, not a whole number", where=self.where
            )
        return value

    def flag(self, *names: str) -> bool:
        """True if any of these names is set to a true value."""
        return any(bool(self.record.get(name)) for name in names)

    def text(self, name: str) -> str | None:
        """The value of this name if it is a string, else None."""
        value = self.record.get(name)
        return value if isinstance(value, str) else None


@dataclass(frozen=True)
class Parallel:
    """The degrees of parallelism."""

    tp: int
    pp: int
    ep: int = 1
    etp: int = 1
    dp: int = 1
    """The number of ranks that share the optimizer of the dense parameters: data-parallel x context-parallel."""
    expert_dp: int = 1
    """The number of ranks that share the optimizer of the experts."""


def arguments_of(root: Value, where: Path) -> Arguments:
    """The arguments in a file. Raises `IncompleteError` if there are none."""
    args = root.get("args") if isinstance(root, dict) else None
    if not isinstance(args, Record) or not isinstance(args.state, dict):
        raise IncompleteError(
            "the file has no arguments (`args`), so it is not known how the model was split",
            where=where,
            hint="Was it saved by Megatron's own save_checkpoint?",
        )
    return Arguments(args, where)


def parallel_of(args: Arguments) -> Parallel:
    """The degrees that the arguments state. Raises `CorruptError` if the degrees contradict each other."""
    tp = args.number("tensor_model_parallel_size", "model_parallel_size")
    pp = args.number("pipeline_model_parallel_size", default=1)
    ep = args.number("expert_model_parallel_size", default=1)
    etp = args.number("expert_tensor_parallel_size", default=tp)
    cp = args.number("context_parallel_size", default=1)
    if 0 in (tp, pp, ep, etp, cp) or max(tp, pp, ep, etp, cp) > 1 << 20:
        raise CorruptError(
            f"the arguments state degrees of tp {tp}, pp {pp}, ep {ep}, etp {etp}, cp {cp}", where=args.where
        )
    dp = args.number("data_parallel_size", default=1)
    world = args.number("world_size", default=tp * pp * cp * dp)
    if world % (tp * pp * cp):
        raise CorruptError(f"{world} ranks are not divisible by tp {tp} x pp {pp} x cp {cp}", where=args.where)
    if not args.optional("num_experts"):
        ep, etp = 1, tp
    if world % (etp * ep * pp):
        raise CorruptError(f"{world} ranks are not divisible by etp {etp} x ep {ep} x pp {pp}", where=args.where)
    instances = args.number("num_distributed_optimizer_instances", default=1) or 1
    return Parallel(tp, pp, ep, etp, world // (tp * pp * instances), world // (etp * ep * pp * instances))


def has_mtp(args: Arguments) -> bool:
    """True if the model has layers for multi-token prediction. The last stage then has a copy of the word table."""
    return bool(args.optional("mtp_num_layers"))


def decayed_norms(args: Arguments) -> bool:
    """True if weight decay applies to the norms of queries and keys."""
    return args.flag("apply_wd_to_qk_layernorm")


def sizes_of(args: Arguments, version: Value = 3.0) -> dict[str, int]:
    """The model's sizes, by the names that the formulas of rules use. A flag is 0 or 1.

    A size that the arguments do not state is left out. `version` is the `checkpoint_version` that is stored next to
    the arguments: before 1.0, a rank stored all its queries, then all its keys, then all its values.

    Raises: UnsupportedError if gate and up projections are interleaved, CorruptError for values that contradict each
    other.
    """
    if args.optional("moe_mlp_glu_interleave_size"):
        raise UnsupportedError(
            "gate and up projections are interleaved in blocks (moe_mlp_glu_interleave_size)", where=args.where
        )
    sizes: dict[str, int] = {}

    def put(name: str, *names: str) -> None:
        value = args.optional(*names)
        if value is not None:
            sizes[name] = value

    put("hidden", "hidden_size")
    put("ffn", "ffn_hidden_size")
    put("heads", "num_attention_heads")
    put("vocab_rows", "padded_vocab_size")
    put("experts", "num_experts")
    put("expert_ffn", "moe_ffn_hidden_size", "ffn_hidden_size")
    put("shared_ffn", "moe_shared_expert_intermediate_size")
    put("q_rank", "q_lora_rank")
    put("kv_rank", "kv_lora_rank")
    put("rope_dim", "qk_pos_emb_head_dim")
    sizes["gated"] = int(args.flag("swiglu", "quick_geglu", "gated_linear_unit", "glu_activation"))
    sizes["latent"] = int(args.flag("multi_latent_attention"))
    sizes["cut_down_proj"] = int(args.text("transformer_impl") == "local")
    sizes["qkv_pieces"] = int(isinstance(version, (int, float)) and version < 1)
    _attention(args, sizes)
    _mamba(args, sizes)
    _delta_net(args, sizes)
    return sizes


def _attention(args: Arguments, sizes: dict[str, int]) -> None:
    heads, hidden = sizes.get("heads"), sizes.get("hidden")
    if not heads or hidden is None:
        return
    dim = args.optional("kv_channels") or hidden // heads
    grouped = args.flag("group_query_attention")
    groups = (args.optional("num_query_groups") if grouped else None) or heads
    if heads % groups:
        raise CorruptError(f"{heads} attention heads cannot be divided into {groups} query groups", where=args.where)
    queries = heads * dim * (2 if args.flag("attention_output_gate") else 1)
    sizes |= {"head_dim": dim, "groups": groups, "qkv_rows": queries + 2 * groups * dim, "attention_out": heads * dim}
    if sizes["latent"]:
        sizes["attention_out"] = heads * args.number("v_head_dim", default=dim)


def _mamba(args: Arguments, sizes: dict[str, int]) -> None:
    head_dim, state, groups = (args.optional(f"mamba_{n}") for n in ("head_dim", "state_dim", "num_groups"))
    hidden = sizes.get("hidden")
    if head_dim and state and groups and hidden:
        heads = args.optional("mamba_num_heads") or 2 * hidden // head_dim
        sizes |= {"mamba_inner": heads * head_dim, "mamba_heads": heads, "mamba_groups": groups}
        sizes["mamba_state"] = groups * state


def _delta_net(args: Arguments, sizes: dict[str, int]) -> None:
    names = ("num_key_heads", "key_head_dim", "num_value_heads", "value_head_dim")
    sizes_stated = [args.optional(f"linear_{name}") for name in names]
    if all(sizes_stated):
        key_heads, key_dim, value_heads, value_dim = (n or 0 for n in sizes_stated)
        sizes |= {"delta_keys": key_heads * key_dim, "delta_values": value_heads * value_dim}
        sizes["delta_heads"] = value_heads
