"""What do the tests find? Seeds faults into the product, and sees for each whether a test fails.

    .venv/bin/python tests/campaigns/mutations.py                 all areas: an hour on 2 cores, resumed if stopped
    .venv/bin/python tests/campaigns/mutations.py --only boxes    one area, or several
    .venv/bin/python tests/campaigns/mutations.py --quick         with the tests of `make quick` alone
    .venv/bin/python tests/campaigns/mutations.py --list          the faults, and nothing else
    .venv/bin/python tests/campaigns/mutations.py --again         try again what was not found, say after a new test
    .venv/bin/python tests/campaigns/mutations.py tests/ckpt -m 'not engines'    only these tests; pytest's options

Every fault is a small change of one function: a comparison turned round, a check or a call left out, the last round of
a loop left out, arguments swapped, a number one too large (`mutating/operators.py`). They are chosen by hash, so many
of each area, evenly over its modules and their functions (`mutating/faults.py`). Each module is compiled once with all
its faults in it, each behind a switch (`mutating/instrument.py`), and pytest collects once. One recorded run of the
tests, in forked processes, shows which test reaches which fault, also through processes that a test starts and through
fixtures that tests share. Then a process is forked for each fault, its switch is turned on, and the tests that reach it
are run, those of `make quick` first, short ones first, until one fails. A test that takes ten times as long as it
should has failed. That the test passes without the fault, alone in a fork, is tried as well.

What is not seen: the kernels in C, and code that runs while a module is imported.

A fault that no test can see, or that none should, stands in `mutating/equivalent.toml` with the reason; another one of
the same function is taken for it. All that is known is kept in `.mutations/`: the record, to be made again after tests
changed much (`--record`), and `results.json`. Not part of `make check`.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # a fork of a process in which OpenMP has started threads waits for them for ever
HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "mutating" / "site")]

from mutating.faults import ROOT, Fault, choose, equivalents  # noqa: E402
from mutating.instrument import write_modules  # noqa: E402

SEED = "1"
AREAS: dict[str, tuple[int, list[str]]] = {
    "boxes": (22, [f"ckpt_formats/core/{name}.py" for name in ("geometry", "flat_partitions", "tensor", "views")]),
    "layouts": (18, [f"ckpt_formats/core/{name}.py" for name in ("layout", "rules", "formula")]),
    "deepspeed": (
        16,
        [
            "ckpt_formats/engines/deepspeed/*.py",
            "ckpt_formats/engines/deepspeed/universal/*.py",
            "!ckpt_formats/engines/deepspeed/write*.py",
            "!ckpt_formats/engines/deepspeed/universal/write*.py",
        ],
    ),
    "megatron": (20, ["ckpt_formats/engines/megatron/*/*.py", "!ckpt_formats/engines/megatron/*/write*.py"]),
    "dcp": (14, ["ckpt_formats/engines/dcp/*.py", "!ckpt_formats/engines/dcp/write.py"]),
    "fsdp_ranks": (14, ["ckpt_formats/engines/fsdp_ranks/*.py"]),
    "hf": (18, ["ckpt_formats/engines/hf/*.py", "!ckpt_formats/engines/hf/write.py", "ckpt_formats/names/*.py"]),
    "torchfile": (
        14,
        [
            "ckpt_formats/containers/torchfile/*.py",
            "ckpt_formats/engines/torch_save.py",
            # Other areas have these.
            "!ckpt_formats/containers/torchfile/pickle_*.py",
            "!ckpt_formats/containers/torchfile/file_window.py",
            "!ckpt_formats/containers/torchfile/writer.py",
            "!ckpt_formats/containers/torchfile/allow_list.py",
            "!ckpt_formats/containers/torchfile/zip_archive.py",
        ],
    ),
    "safetensors": (
        8,
        [
            "ckpt_formats/containers/safetensors*.py",
            "ckpt_formats/containers/shard_index.py",
            "ckpt_formats/engines/safetensors.py",
        ],
    ),
    "state_dicts": (14, ["ckpt_formats/state_dicts/*.py"]),
    "universal": (14, ["ckpt_formats/universal/*.py", "ckpt_formats/core/values.py"]),
    "writers": (
        18,
        [
            "ckpt_formats/engines/*/write*.py",
            "ckpt_formats/engines/*/*/write*.py",
            "ckpt_formats/containers/torchfile/pickle_writer.py",
            "ckpt_formats/containers/torchfile_tree.py",
            "ckpt_formats/core/transfer.py",
        ],
    ),
    "seals": (14, ["ckpt_formats/core/files.py", "ckpt_formats/containers/sealed_json.py", "ckpt/findings/*.py"]),
    "journal": (
        18,
        ["ckpt/pipeline/*.py", "ckpt/job/*.py"],
    ),
    "stores": (18, ["ckpt_formats/stores/*.py", "ckpt/holding/*.py"]),
    "publishing": (14, ["ckpt/publishing/*.py", "ckpt/following/*.py", "ckpt/copying/*.py", "ckpt/runs/*.py"]),
    "chains": (18, ["ckpt/chains/*.py", "ckpt_formats/universal/chain/*.py"]),
    "codecs": (16, [f"ckpt_codecs/{room}*.py" for room in ("", "chunk/", "lossless/", "native/")]),
    "deltas": (14, ["ckpt_codecs/deltas/*.py", "ckpt_codecs/deltas/residuals/*.py", "ckpt_codecs/optimizers/*.py"]),
    "lossy": (12, ["ckpt_codecs/lossy/*.py"]),
    "safety": (
        16,
        [
            "ckpt_formats/containers/torchfile/pickle_reader.py",
            "ckpt_formats/containers/torchfile/opcodes.py",
            "ckpt_formats/containers/torchfile/allow_list.py",
            "ckpt_formats/containers/torchfile/zip_archive.py",
            "ckpt_formats/containers/torchfile/file_window.py",
            "ckpt_formats/core/text.py",
            "ckpt_formats/containers/json_checks.py",
            "ckpt_formats/containers/typed_json.py",
        ],
    ),
}


def main(arguments: Sequence[str]) -> int:
    options, pytest_options = _options(arguments)
    known = equivalents(HERE / "mutating" / "equivalent.toml")
    functions = choose(AREAS, SEED)
    faults = [fault for of_one in functions for fault in of_one]
    firsts = [next((fault for fault in of_one if fault.key not in known), None) for of_one in functions]
    chosen = [fault for fault in firsts if fault and (not options.only or fault.area in options.only)]
    if options.list:
        for fault in chosen:
            print(f"{fault.area:12} {fault.place:55} {fault.function}: [{fault.change.operator}] {fault.change.text}")
        return 0
    options.folder.mkdir(exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    results = Results(options.folder / ("quick.json" if options.quick else "results.json"))
    with tempfile.TemporaryDirectory(prefix="ckpt-mutations-") as folder:
        write_modules(faults, Path(folder))
        os.environ["CKPT_FAULTS"] = folder
        os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE / "mutating" / "site"), os.environ.get("PYTHONPATH", "")])
        import fault_switch

        fault_switch.install(folder)
        _measure(faults, chosen, results, options, pytest_options)
    print(table(chosen, results))
    return 0


def _options(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("--only", action="append", choices=list(AREAS), help="an area; may be given again")
    parser.add_argument("--quick", action="store_true", help="only the tests of make quick")
    parser.add_argument("--list", action="store_true", help="print the faults")
    parser.add_argument("--record", action="store_true", help="record anew what the tests reach")
    parser.add_argument("--cases", type=int, help="at most so many cases of each test: a look, no measure")
    parser.add_argument("--record-only", action="store_true", help="try no fault")
    parser.add_argument("--again", action="store_true", help="try again what was not found")
    parser.add_argument("--anew", action="store_true", help="forget all results")
    parser.add_argument("--jobs", type=int, default=2, help="forks at a time")
    parser.add_argument("--budget", type=float, default=240, help="seconds for each fault")
    parser.add_argument("--folder", type=Path, default=ROOT / ".mutations", help="where results are kept")
    return parser.parse_known_args(arguments)


class Results:
    """What is known of each fault, by its key; kept in a file after each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.known: dict[str, dict[str, object]] = json.loads(path.read_text()) if path.exists() else {}

    def add(self, fault: Fault, **what: object) -> None:
        self.known[fault.key] = {"area": fault.area, "place": fault.place, "operator": fault.change.operator, **what}
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(self.known, indent=1, ensure_ascii=False))
        new.replace(self._path)


def _measure(
    faults: list[Fault], chosen: list[Fault], results: Results, settings: argparse.Namespace, pytest_options: list[str]
) -> None:
    import pytest

    from mutating.session import Plugin
    from mutating.trials import measure

    if settings.anew:
        results.known.clear()
    options = ["-q", "-s", "-p", "no:cacheprovider", "-p", "no:xdist", "--timeout=0", *pytest_options]
    plugin = Plugin(lambda collected: measure(faults, chosen, collected, results, settings))
    os.chdir(ROOT)
    code = pytest.main(options, plugins=[plugin])
    if code not in (0, 5):
        raise SystemExit(f"pytest ended with {code}")


def table(faults: Iterable[Fault], results: Results) -> str:
    """By area: how many faults, and how many were found; then each that was not."""
    faults = list(faults)
    rows: dict[str, Counter[str]] = {}
    lines, missed = ["| area | seeded | found | by quick |", "|---|---:|---:|---:|"], []
    for fault in faults:
        known = results.known.get(fault.key)
        if known is None:
            continue
        row = rows.setdefault(fault.area, Counter())
        row.update(["seeded"] + ["found"] * bool(known["found_by"]) + ["quick"] * bool(known["quick"]))
        if not known["found_by"]:
            tests = known["tests"]
            assert isinstance(tests, list)
            how = f"{known['ran']} of {known['reaching']} tests reached it" if tests else "no test reaches it"
            missed.append(f"- {fault.place} `{fault.function}`: {fault.change.text}  ({how}: {', '.join(tests[:5])})")
    whole: Counter[str] = sum(rows.values(), Counter())
    for area, row in [*rows.items(), ("all", whole)]:
        lines.append(f"| {area} | {row['seeded']} | {_share(row, 'found')} | {_share(row, 'quick')} |")
    return "\n".join([*lines, "", "Not found:", "", *missed, time.strftime("%n(%Y-%m-%d %H:%M)")])


def _share(row: Counter[str], what: str) -> str:
    return f"{row[what]} ({100 * row[what] / max(1, row['seeded']):.0f} %)"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
