"""The origin of a Megatron checkpoint: its engine, iteration and layout."""

from collections.abc import Mapping

from ckpt_formats.core.checkpoint import Origin
from ckpt_formats.core.values import Value, is_natural
from ckpt_formats.engines.megatron.shared.arguments import Arguments, Parallel
from ckpt_formats.engines.megatron.shared.stages import Stages


def origin_of(
    args: Arguments, parallel: Parallel, stages: Stages | None, root: Mapping[str, Value], container: str
) -> Origin:
    """The origin; `container` is `torch` or `torch_dist`. The version is None, because Megatron does not save it."""
    iteration = root.get("iteration")
    layout: dict[str, Value] = {
        "container": container,
        "tp": parallel.tp,
        "pp": parallel.pp,
        "vpp": 1 if stages is None else stages.chunks,
        "ep": parallel.ep,
        "etp": parallel.etp,
        "dp": parallel.dp,
        "layers_impl": args.text("transformer_impl"),
    }
    if stages is not None:
        layout["layers"] = list(stages.counts)
    return Origin("megatron", None, iteration if is_natural(iteration) else None, layout)
