"""Pages of every kind, for a browser: of hostile names, of many tensors, and of figures that are known."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import ckpt
from ckpt.compare import compare, pair_tensors
from ckpt.compare.result import Diff, TensorDiff
from ckpt.compare.sums import DiffSums, Histogram
from ckpt.pipeline import Execution
from ckpt.planning.simulate import exponential, simulate
from ckpt_cli.views import chain_log, checkpoints, inspect_page
from ckpt_cli.views.diff import page_of as diff_page
from ckpt_cli.views.plan import PlanReport
from ckpt_cli.views.plan import page_of as plan_page
from ckpt_cli.views.plan import to_json as plan_fields
from ckpt_cli.views.stats import page_of as stats_page
from ckpt_formats.core.checkpoint import Checkpoint, Group, Origin, SourceFile
from ckpt_formats.core.notices import Notice
from damage import SAMPLES
from held import checkpoint, parameter

DEEPSPEED = SAMPLES / "deepspeed-0.19-zero1-bf16-dp2"
"""A difference names the formats at the paths of both."""
NAMES = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(2)>',
    "</script><!-- {{facts}} {% raw %} {{script}}",
    "layers.0.\u202etxet",
    "layers.1.a\nb\x1b[31m&amp;",
    "\u2028'`${x}`",
    "x" * 10_000,
    ".".join("y" * 5_000),
    "__proto__",
    "constructor.0.prototype",
    "",
    "..",
    "\u05e9\u05dc\u05d5\u05dd.\u05de\u05e9\u05e7\u05dc",
    "\u6a21\u578b.0.\u91cd\u91cf",
]
ROLES = {
    "self_attn.q_proj.weight": (1, 1),
    "self_attn.k_proj.weight": (1, 1),
    "self_attn.v_proj.weight": (1, 1),
    "self_attn.o_proj.weight": (1, 1),
    "mlp.gate_proj.weight": (3, 1),
    "mlp.up_proj.weight": (3, 1),
    "mlp.down_proj.weight": (1, 3),
    "input_layernorm.weight": (1,),
    "post_attention_layernorm.weight": (1,),
}
"""Of a layer, with their shapes in multiples of the width."""


def model(layers: int, width: int, seed: int = 0, names: Iterable[str] = (), step: int = 1000) -> Checkpoint:
    """A model of layers with Adam's states, as two ranks would have saved it, and tensors of further names."""
    rng, shapes = np.random.default_rng(seed), {"embed_tokens.weight": (8 * width, width)}
    for layer in range(layers):
        for role, sizes in ROLES.items():
            shapes[f"model.layers.{layer}.{role}"] = tuple(size * width for size in sizes)
    shapes |= {"lm_head.weight": (8 * width, width)} | dict.fromkeys(names, (5, 4))
    parameters = []
    for name, shape in shapes.items():
        values = rng.normal(size=shape).astype(np.float32)
        copy = values.astype(ml_dtypes.bfloat16)
        parameters.append(parameter(name, {"master": values, "model": copy, "exp_avg": values, "exp_avg_sq": values}))
    extras = {"epoch": 1, "<b>note</b>": "</script><script>alert(3)</script>", "lr_scheduler": {"last_epoch": step}}
    result = checkpoint(
        parameters,
        groups=(Group({"lr": 1e-4, "betas": (0.9, 0.95), "<i>": "</script>"}, tuple(shapes)),),
        extras=extras,
        aliases={"<u>tied</u>": "lm_head.weight"},
        origin=Origin("DeepSpeed", "0.19.8", step, {"dp": 2, "zero": 1}),
        path=Path("runs/llama/<b>global</b>_step1000"),
    )
    files = tuple(
        SourceFile(result.path / f"zero_pp_rank_{rank}_<i>_optim_states.pt", 1 << 20, "optimizer", {"dp": rank})
        for rank in range(2)
    )
    return replace(result, files=files, notices=(Notice("in the folder, and not read", ("<script>",)),))


def inspect(source: Checkpoint) -> str:
    return inspect_page.page_of(source)


def diff(first: Checkpoint, second: Checkpoint) -> str:
    first, second = (replace(one, path=DEEPSPEED) for one in (first, second))
    return diff_page(first, second, compare(pair_tensors(first, second), Execution()))


def stats(source: Checkpoint) -> str:
    """The page of a checkpoint whose head has NaN and infinity."""
    broken = np.array([[np.nan, np.inf, -np.inf, 0.0]], np.float32)
    head = parameter("lm_head.weight", {"model": broken, "exp_avg": np.zeros((1, 4), np.float32)})
    source = replace(source, parameters={**source.parameters, "lm_head.weight": head})
    return stats_page(source, ckpt.stats(source))


def notebook(first: Checkpoint, second: Checkpoint, chain: Path) -> str:
    """What a notebook shows of a checkpoint, a parameter, a difference and a chain, each in the output of a cell."""
    difference = compare(pair_tensors(first, second), Execution())
    shown = [first, next(iter(first.parameters.values())), difference, ckpt.Chain(chain)]
    outputs = "".join(f"<section aria-label='output {i}'>{one._repr_html_()}</section>" for i, one in enumerate(shown))
    head = "<!doctype html><html lang=en><meta name=viewport content='width=device-width'><title>notebook</title>"
    return f"{head}<main><h1>notebook</h1>{outputs}</main></html>"


def diff_of_many(count: int) -> str:
    """The difference of two checkpoints of so many tensors, of which nothing is computed."""
    first, rng = replace(model(0, 1), path=DEEPSPEED), np.random.default_rng(0)
    pairs = []
    for i in range(count):
        role, changed = list(ROLES)[i % len(ROLES)], int(rng.integers(1, 1000))
        sums = DiffSums(1000, changed, 0.1, float(rng.random()), 10.0, 10.0, 9.9, 0, Histogram(-9, (changed // 2, 1)))
        pairs.append(TensorDiff(f"model.layers.{i // len(ROLES)}.{role}", "model", "changed", "", sums))
    return diff_page(first, first, Diff(tuple(pairs)))


def log(chain: Path, recorded: Path) -> str:
    """The page of `log_fields`, with names of strangers and segments that are torn and unreadable."""
    fields = log_fields(chain, recorded)
    segments = [{**one, "codec": "<b>exact</b>"} for one in fields["segments"]]
    segments[0]["torn"] = {"<script>.log": "</script><script>alert(4)</script>"}
    segments.append({"folder": "gradients-9", "first": 1200, "last": None, "time": "", "error": "<b>cannot</b>"})
    return chain_log.page_of(Path("runs/<b>run</b>.chain"), {**fields, "segments": segments})


def log_fields(chain: Path, recorded: Path) -> dict[str, Any]:
    """A new chain of exact bases and approximate deltas, with the segments of a recorded run."""
    run, rng = ckpt.Chain(chain), np.random.default_rng(0)
    values = rng.normal(size=(64, 64)).astype(np.float32)
    for step in range(100, 1300, 100):
        values = (values + rng.normal(size=values.shape) * 1e-3 * (1 + step % 500 / 100)).astype(np.float32)
        origin, path = Origin("held", "1", step), chain.with_name(f"{step}.pt")
        state = checkpoint([parameter("layers.0.w", {"master": values, "exp_avg": values})], origin=origin, path=path)
        run.append(state, ckpt.DeltaPolicy(base_every=5, codec="lc"), step=step)
    segments = _log_fields(recorded)["segments"]
    later = [{**one, "first": one["first"] * 200, "last": one["last"] * 200} for one in segments]
    return {**_log_fields(chain), "segments": later}


def edge_cases(chain: Path, recorded: Path) -> dict[str, str]:
    """Pages of next to nothing, and of chains with very many states and with extreme figures."""
    fields, many = _log_fields(chain), 10_000
    members = fields["steps"]
    extreme = {"<b>": {"rel": 1e-300, "max_abs": 1e300}, "none": {"rel": 0.0, "max_abs": None}}
    chains = {
        "a family": {
            "steps": [
                {**one, "name": f"m{i}", "parent": None if one["kind"] == "base" else "m0"}
                for i, one in enumerate(fields["steps"])
            ],
            "segments": [],
        },
        "no state": {"steps": [], "raw_nbytes": 0, "stored_nbytes": 0, "segments": _log_fields(recorded)["segments"]},
        "many states": {"steps": [{**members[i % len(members)], "step": 10 * i} for i in range(many)]},
        "extreme states": {"steps": [{**members[1], "step": 10**15 + i, "errors": extreme} for i in range(3)]},
    }
    empty = np.zeros((0, 3), np.float32)
    checkpoints = {
        "nothing": checkpoint([]),
        "a scalar": checkpoint([parameter("w", {"model": np.ones((), np.float32)})]),
        "no elements": checkpoint([parameter(name, {"model": empty}) for name in ("w", "x.y", "x.z")]),
        "an extra": checkpoint([parameter("rng", {"model": np.zeros(3, np.uint8)}, role="extra")]),
    }
    nothing = replace(checkpoint([]), path=DEEPSPEED)
    return {
        **{name: chain_log.page_of(Path("run.chain"), {**fields, **own}) for name, own in chains.items()},
        **{name: inspect(one) for name, one in checkpoints.items()},
        "no difference": diff_page(nothing, nothing, Diff(())),
    }


def _log_fields(chain: Path) -> dict[str, Any]:
    from ckpt.chains.segments import open_segments

    index = ckpt.Chain(chain).index
    fields = chain_log.to_json(index, open_segments(chain, index))
    for member in fields["steps"]:
        member["time"] = "2026-11-23T12:00:00Z"
    return fields


def run() -> str:
    """The page of a run with hostile names; every third checkpoint is not whole."""
    rows = [
        {
            "name": f"step{number}{name}",
            "path": f"runs/{name}",
            "format": "deepspeed" if number % 2 else None,
            "step": number * 100 if number % 3 else None,
            "nbytes": 1 << number if number % 3 else None,
            "whole": number % 3 != 0,
            "problem": None if number % 3 else f"{name} is missing",
        }
        for number, name in enumerate(NAMES)
    ]
    last = rows[-1]["name"]
    return checkpoints.page_of(
        {"path": "runs/<b>llama</b>", "checkpoints": rows, "default": None, "latest": last, "newest_whole": last}
    )


def plan() -> str:
    costs = ckpt.planning.RunCosts(step=0.8, mtbf=3 * 3600, base_stall=20, restart=120)
    schedule = ckpt.planning.plan_schedule(costs, ckpt.planning.LogCosts(replay=0.04, slowdown=0.01))
    times = exponential(costs.mtbf, 500, 0).tolist()
    simulations = {"bases": simulate(schedule.run, None, schedule.bases.base_steps, None, times)}
    report = PlanReport(schedule, None, simulations, {"source": "exponential", "seed": 0})
    return plan_page(report, plan_fields(report))
