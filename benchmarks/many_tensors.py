"""Open checkpoints of many small tensors: `python benchmarks/many_tensors.py --rounds 5 --other ../main`.

Makes three checkpoints of the same state, in a temporary folder: a file of `torch.save` with model and AdamW (20,000
parameters: weight, step, exp_avg, exp_avg_sq), a file of safetensors with the same tensors, and a folder of
`torch.distributed.checkpoint`. Opens each in fresh processes, one program after the other: from `ckpt.open(path)`
until every state has been asked for its shape and type. Imports are done before. Prints medians of CPU seconds (user
and system), microseconds a tensor, and the ratio to the goal and to a peer: `torch.load(mmap=True, weights_only=True)`;
`safetensors.safe_open` and the shape of each slice; torch's own reader of `.metadata`.

`--other FOLDER` also measures another checkout, with its own `.venv`. `--stages` prints where CPU goes; `--profile
KIND` prints cProfile of one opening, which makes it about four times as slow.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

GOAL = 20.0
"""Microseconds of CPU for each tensor."""

STATES = ("step", "exp_avg", "exp_avg_sq")
KINDS = {"torch": "state.pt", "safetensors": "state.safetensors", "dcp": "dcp"}

_BEGIN = """
import json, resource, sys
from pathlib import Path

def cpu():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime

path = Path(sys.argv[1])
"""
_OURS = (
    _BEGIN
    + """
import ckpt
from ckpt_formats.registry import FORMATS, format_named
[*map(format_named, FORMATS)], ckpt.open

def known(checkpoint):
    return sum(1 for _, _, tensor in checkpoint.tensors() if tensor.shape is not None and tensor.dtype)
"""
)
OPEN = _OURS + "began = cpu()\ncount = known(ckpt.open(path))\nprint(json.dumps([cpu() - began, count]))\n"
PROFILE = (
    _OURS
    + """
import cProfile, pstats
profile = cProfile.Profile()
profile.runcall(lambda: known(ckpt.open(path)))
pstats.Stats(profile).sort_stats("tottime").print_stats(40)
"""
)
STAGES = (
    _OURS
    + """
import importlib
spent = {}

def timed(place):
    module, _, name = place.partition(":")
    try:
        owner = importlib.import_module(f"ckpt_formats.{module}")
        *outer, last = name.split(".")
        for part in outer:
            owner = getattr(owner, part)
        inside = getattr(owner, last)
    except (ImportError, AttributeError):
        return  # another version of ckpt

    def measured(*args, **options):
        began = cpu()
        try:
            return inside(*args, **options)
        finally:
            spent[place] = spent.get(place, 0) + cpu() - began

    setattr(owner, last, measured)

for place in json.loads(sys.argv[2]):
    timed(place)
began = cpu()
count = known(ckpt.open(path))
print(json.dumps([cpu() - began, count, spent]))
"""
)
PEERS = {
    "torch": _BEGIN
    + """
import torch
began = cpu()
found = torch.load(path, mmap=True, weights_only=True)
count = len(found["model"]) + sum(map(len, found["optimizer"]["state"].values()))
print(json.dumps([cpu() - began, count]))
""",
    "safetensors": _BEGIN
    + """
from safetensors import safe_open
began = cpu()
with safe_open(path, "numpy") as file:
    count = sum(1 for name in file.keys() if file.get_slice(name).get_shape() is not None)
print(json.dumps([cpu() - began, count]))
""",
    "dcp": _BEGIN
    + """
from torch.distributed.checkpoint import FileSystemReader
began = cpu()
count = sum(hasattr(one, "chunks") for one in FileSystemReader(path).read_metadata().state_dict_metadata.values())
print(json.dumps([cpu() - began, count]))
""",
}
PEER_NAMES = {"torch": "torch.load(mmap=True)", "safetensors": "safe_open", "dcp": "FileSystemReader.read_metadata"}
PLACES = (
    "registry.opening:locate",
    "containers.torchfile.reader:read_directory",
    "containers.torchfile.reader:Interpreter.load",
    "containers.torchfile.pickle_reader:check_repeated",
    "containers.safetensors:parse_json_object",
    "engines.safetensors:read_weights",
    "engines.dcp.read:read_metadata",
    "engines.torch_save:whole_tree",
    "state_dicts.read:open_objects",
    "state_dicts.read:match_optimizers",
    "state_dicts.optimizer:match_numbers",
    "state_dicts.read:_parameters",
    "engines.torch_save:training_state",
    "engines.dcp.read:training_state",
    "registry.opening:check_states",
    "registry.opening:identified",
)
"""Functions whose time is printed; some call others among them."""


def make(folder: Path, count: int) -> None:
    """The three checkpoints of `count` parameters of 48 elements."""
    import torch
    from safetensors.torch import save_file
    from torch.distributed import checkpoint

    torch.manual_seed(0)
    kinds = ("self_attn.q_proj.weight", "self_attn.o_proj.weight", "mlp.up_proj.weight", "input_layernorm.weight")
    names = [f"model.layers.{i // 4}.{kinds[i % 4]}" for i in range(count)]
    parameters = [torch.nn.Parameter(torch.randn((48,) if "norm" in name else (8, 6))) for name in names]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, foreach=True)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    model = dict(zip(names, (parameter.detach() for parameter in parameters), strict=True))
    state = optimizer.state_dict()
    torch.save({"model": model, "optimizer": state}, folder / KINDS["torch"])
    by_name = {name: state["state"][i] for i, name in enumerate(names)}
    flat = {f"{name}/{key}": by_name[name][key] for name in names for key in STATES}
    save_file({**model, **flat}, folder / KINDS["safetensors"])
    group = {**state["param_groups"][0], "params": names}
    checkpoint.save(
        {"model": model, "optim": {"state": by_name, "param_groups": [group]}},
        checkpoint_id=folder / KINDS["dcp"],
        no_dist=True,
    )


def run(python: Path | str, program: str, *arguments: str) -> str:
    """What a program prints."""
    command = [str(python), "-W", "ignore", "-c", program, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=list(KINDS))
    parser.add_argument("--other", type=Path, metavar="FOLDER")
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="keep the checkpoints here, and use those there are"
    )
    parser.add_argument("--stages", action="store_true")
    parser.add_argument("--profile", choices=list(KINDS))
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ckpt-bench-") as temporary:
        folder = options.keep or Path(temporary)
        if not (folder / KINDS["dcp"]).is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            make(folder, options.parameters)
        if options.profile:
            print(run(sys.executable, PROFILE, str(folder / KINDS[options.profile])))
            return
        checkouts = {"ckpt": sys.executable}
        if options.other:
            checkouts = {"before": options.other / ".venv/bin/python", **checkouts}
        measurements = {}
        for kind in [options.only] if options.only else KINDS:
            measurements[kind] = _measure(kind, folder / KINDS[kind], checkouts, options)
    if options.json:
        options.json.write_text(json.dumps(measurements, indent=1) + "\n")


def _measure(
    kind: str, path: Path, checkouts: dict[str, Path | str], options: argparse.Namespace
) -> dict[str, list[float]]:
    """CPU seconds of each run of each program. Prints the table of one kind of checkpoint."""
    programs = {**{name: (python, OPEN) for name, python in checkouts.items()}, "peer": (sys.executable, PEERS[kind])}
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    counts: dict[str, int] = {}
    for _ in range(options.rounds):
        for name, (python, program) in programs.items():
            spent, counts[name] = json.loads(run(python, program, str(path)))
            seconds[name].append(spent)
    peer = median(seconds["peer"])
    print(f"{kind:34}{'CPU s':>8}{'tensors':>10}{'µs each':>10}{'to goal':>10}{'to peer':>10}")
    for name, runs in seconds.items():
        each = median(runs) / counts[name] * 1e6
        title = PEER_NAMES[kind] if name == "peer" else name
        ratios = f"{each / GOAL:10.2f}{median(runs) / peer:10.2f}"
        print(f"  {title:32}{median(runs):8.2f}{counts[name]:10,}{each:10.1f}{ratios}")
    if options.stages:
        _print_stages(path, checkouts)
    return seconds


def _print_stages(path: Path, checkouts: dict[str, Path | str]) -> None:
    spent = {}
    for name, python in checkouts.items():
        total, _, spent[name] = json.loads(run(python, STAGES, str(path), json.dumps(PLACES)))
        spent[name]["all"] = total
    print(f"  {'stages, CPU ms':52}{''.join(f'{name:>10}' for name in spent)}")
    for place in (*PLACES, "all"):
        if any(own.get(place, 0) > 0.002 for own in spent.values()):
            print(f"    {place:50}{''.join(f'{1e3 * own.get(place, 0):10.0f}' for own in spent.values())}")


if __name__ == "__main__":
    main()
