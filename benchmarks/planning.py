"""Plan checkpoints of many ranks: `python benchmarks/planning.py --ranks 64 256 1024 --parameters 1280 10240`.

The source is an index in memory: tensors that say where they are, in files that do not exist, because planning reads
no tensor. Each case runs in a fresh process. Printed are CPU seconds (user and system) of `Job.plan` with all its
checks, peak memory beyond that of the index, and the same for what `convert --dry-run`, `reshard --dry-run` and
`reshard --dry-run --json` print of the plan. For work on other machines: MB of the pickled job, which a worker gets
once; CPU seconds until it has planned it again; and bytes of a task, which is one file.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import pickle
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TASK_NBYTES = 1000
GOALS = {"plan": 5.0, "convert": 10.0, "reshard": 10.0, "json": 10.0}
PEAK_MB = 200.0
CASES = ("zero3", "zero2", "zero1", "pipeline", "dcp", "dcp-tp", "megatron", "megatron-legacy")
STAGES = 8
FILE = Path("/nowhere/source.bin")


def source(parameters: int, ranks: int, kind: str) -> Any:
    """A decoder's index: a master, a bf16 copy and two moments of each of about `parameters` tensors."""
    from ckpt_formats.core.checkpoint import Checkpoint, Group, Origin, Parameter
    from ckpt_formats.core.dtypes import DTYPES
    from ckpt_formats.core.tensor import FileBlob, Tensor
    from ckpt_formats.core.values import Global, Record

    hidden = 1024
    layer = {
        "input_layernorm.weight": (hidden,),
        "self_attention.linear_qkv.weight": (3 * hidden, hidden),
        "self_attention.linear_qkv.bias": (3 * hidden,),
        "self_attention.linear_proj.weight": (hidden, hidden),
        "self_attention.linear_proj.bias": (hidden,),
        "pre_mlp_layernorm.weight": (hidden,),
        "mlp.linear_fc1.weight": (8 * hidden, hidden),
        "mlp.linear_fc1.bias": (8 * hidden,),
        "mlp.linear_fc2.weight": (hidden, 4 * hidden),
        "mlp.linear_fc2.bias": (hidden,),
    }
    layers = max(parameters // len(layer) // 64, 1) * 64  # so that they divide over stages
    shapes = {"embedding.word_embeddings.weight": (32000, hidden)}
    shapes |= {f"decoder.layers.{i}.{name}": shape for i in range(layers) for name, shape in layer.items()}
    shapes |= {"decoder.final_layernorm.weight": (hidden,), "output_layer.weight": (32000, hidden)}
    if kind == "pipeline":  # names of a PipelineModule: numbers of layers
        numbers = {"embedding": 0, "decoder.final_layernorm": layers + 1, "output_layer": layers + 2}
        shapes = {
            f"{int(name.split('.')[2]) + 1}.{name.split('.', 3)[3]}"
            if ".layers." in name
            else f"{next(number for start, number in numbers.items() if name.startswith(start))}.weight": shape
            for name, shape in shapes.items()
        }
    types = {"master": "float32", "model": "bfloat16", "exp_avg": "float32", "exp_avg_sq": "float32"}
    at, index = 0, {}
    for name, shape in shapes.items():
        states = {}
        for state, dtype in types.items():
            states[state] = Tensor.of(FileBlob.packed(FILE, at, shape, DTYPES[dtype]))
            at += states[state].nbytes
        index[name] = Parameter(name, "parameter", states, {"step": 7})
    names = tuple(index)
    options = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    halves = names[::2], names[1::2]
    groups = tuple(Group({**options, "weight_decay": w}, half) for w, half in zip((0.1, 0.0), halves, strict=True))
    if kind.startswith("megatron"):
        args = megatron_arguments(layers, hidden)
        origin = Origin("megatron", "0.14", 7, {"tp": 1, "pp": 1})
        extras: dict[str, Any] = {"args": Record(Global("argparse", "Namespace"), state=args)}
        groups = tuple(Group({**group.options, "wd_mult": 1.0, "lr_mult": 1.0}, group.names) for group in groups)
        return Checkpoint(path=Path("/nowhere"), origin=origin, parameters=index, groups=groups, extras=extras)
    layout: dict[str, Any] = {"zero_stage": 1, "dp": 8}
    if kind == "pipeline":
        stages = [list(range(i * (layers + 3) // STAGES, (i + 1) * (layers + 3) // STAGES)) for i in range(STAGES)]
        layout["pipeline"] = {"stages": stages, "tied": {}, "users": {}}
    return Checkpoint(
        path=Path("/nowhere"),
        origin=Origin("deepspeed", "0.19.8", 7, layout),
        parameters=index,
        groups=groups,
        extras={"epoch": 3},
    )


def megatron_arguments(layers: int, hidden: int) -> dict[str, Any]:
    degrees = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "world_size", "data_parallel_size")
    return {
        **dict.fromkeys((*degrees, "expert_model_parallel_size", "context_parallel_size"), 1),
        "num_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": 4 * hidden,
        "num_attention_heads": 16,
        "num_query_groups": 16,
        "group_query_attention": False,
        "kv_channels": hidden // 16,
        "swiglu": True,
        "add_bias_linear": True,
        "padded_vocab_size": 32000,
        "transformer_impl": "local",
        "bf16": True,
        "untie_embeddings_and_output_weights": True,
        "use_distributed_optimizer": True,
        "num_experts": None,
    }


def format_of(case: str, ranks: int) -> Any:
    """The format with its degrees: tensor parallelism within a node of 8, 8 stages where there are stages."""
    from ckpt_formats.core.layout import Rule
    from ckpt_formats.registry import format_named

    rules = (
        Rule(r".*(linear_qkv|linear_fc1)\.(weight|bias)|.*word_embeddings\.weight|output_layer\.weight", axis=0),
        Rule(r".*(linear_proj|linear_fc2)\.weight", axis=1),
        Rule(r".*", "replicated"),
    )
    if case.startswith("zero"):
        options = {"dp": ranks, "zero": int(case[4:])}
    elif case == "pipeline":
        options = {"dp": ranks // STAGES, "pp": STAGES, "zero": 1}
    elif case == "dcp":
        options = {"dp": ranks}
    elif case == "dcp-tp":
        options = {"dp": ranks // 8, "tp": 8, "rules": rules}
    else:
        stages = min(ranks // 8, 64)
        options = {"tp": 8, "pp": stages, "dp": ranks // 8 // stages}
    kind = format_named({"z": "deepspeed", "p": "deepspeed", "d": "dcp"}.get(case[0], case))
    return type(kind)(**options)


def used() -> tuple[float, float]:
    """CPU seconds, and the peak of memory in MB."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def measure(case: str, ranks: int, parameters: int, views: bool) -> None:
    """Print the figures of one case as JSON."""
    from ckpt.job import Job, shared_plan
    from ckpt_cli.views import inspect, job

    checkpoint, format = source(parameters, ranks, case), format_of(case, ranks)
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "out"
        work = Job(checkpoint, target, format)
        seconds, peak = used()
        plan = work.plan()
        now, peak_now = used()
        figures["plan"], figures["peak"] = now - seconds, peak_now - peak
        figures |= {"files": len(plan.files), "nbytes": plan.nbytes}
        shared = pickle.dumps(shared_plan(work), 5)
        figures["job"] = len(shared) / 1e6
        figures["task"] = len(pickle.dumps((len(plan.files) - 1,), 5))
        seconds, _ = used()
        pickle.loads(shared).files((0,))
        figures["worker"] = used()[0] - seconds
        shown = {
            "convert": lambda: job.show_plan(checkpoint, plan, target, format.name, False),
            "reshard": lambda: inspect.print_ranks(checkpoint, plan.files, target, format.name, False),
            "json": lambda: inspect.print_ranks(checkpoint, plan.files, target, format.name, True),
        }
        for name, show in shown.items() if views else ():
            seconds, _ = used()
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                show()
            figures[name] = used()[0] - seconds
    print(json.dumps(figures))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--parameters", type=int, nargs="+", default=[1280, 10240])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--no-views", action="store_true", help="planning alone")
    parser.add_argument("--timeout", type=float, default=600, help="seconds that a case may take")
    parser.add_argument("--one", nargs=3, metavar=("CASE", "RANKS", "PARAMETERS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        measure(options.one[0], int(options.one[1]), int(options.one[2]), not options.no_views)
        return
    print(f"goals: plan {GOALS['plan']:g} s, {PEAK_MB:g} MB; each of the others {GOALS['json']:g} s; CPU seconds")
    widths = {"ranks": 7, "tensors": 9, "files": 7, "plan": 8, "MB": 7, "job MB": 8, "worker": 8, "task B": 8}
    widths |= {"convert": 9, "reshard": 9, "--json": 8}
    print(" " * 16 + "".join(f"{name:>{width}}" for name, width in widths.items()))
    for case in options.cases:
        for parameters in options.parameters:
            for ranks in options.ranks:
                command = [sys.executable, __file__, "--one", case, str(ranks), str(parameters)]
                command += ["--no-views"] * options.no_views
                head = f"{case:16}{ranks:7}{parameters:9}"
                try:
                    done = subprocess.run(command, capture_output=True, text=True, timeout=options.timeout)
                except subprocess.TimeoutExpired:
                    print(f"{head}  not done after {options.timeout:g} s", flush=True)
                    continue
                if done.returncode:
                    print(f"{head}  {done.stderr.strip().splitlines()[-1]}", flush=True)
                    continue
                figures = json.loads(done.stdout)
                shown = (f"{figures[name]:9.2f}" if name in figures else f"{'':9}" for name in ("convert", "reshard"))
                last = f"{figures['json']:8.2f}" if "json" in figures else ""
                of_worker = f"{figures['job']:8.1f}{figures['worker']:8.2f}{figures['task']:8}"
                row = (
                    f"{figures['files']:7}{figures['plan']:8.2f}{figures['peak']:7.0f}{of_worker}{''.join(shown)}{last}"
                )
                print(f"{head}{row}{' missed' * missed(figures)}", flush=True)


def missed(figures: dict[str, Any]) -> bool:
    """Whether a goal was missed."""
    if figures["task"] > TASK_NBYTES:
        return True
    return figures["peak"] > PEAK_MB or any(figures.get(name, 0) > goal for name, goal in GOALS.items())


if __name__ == "__main__":
    main()
