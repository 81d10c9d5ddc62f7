"""A digest of what every sample becomes in every format, to hold a change of the code's structure against.

    python tests/campaigns/behaviour.py before.json      # on the old tree
    python tests/campaigns/behaviour.py after.json --compare before.json

`--values` compares the universal format by its decoded values: then its stored form may change.
"""

import argparse
import hashlib
import io
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np

from ckpt_cli.main import cli

SAMPLES = Path(__file__).resolve().parents[2] / "sample_checkpoints"
TARGETS = ("universal", "deepspeed-universal", "deepspeed", "megatron", "megatron-legacy", "dcp", "hf", "safetensors")
TARGETS += ("torch",)
RESHARDED = ("deepspeed", "dcp", "megatron")
CODINGS = {
    "lossless": (),
    "balanced": ("--preset", "balanced"),
    "lc": ("--codec", "lc:bits=3"),
    "excp": ("--codec", "excp"),
    "difference": ("--codec", "difference"),
}


def run(*arguments: object) -> tuple[str, str]:
    """The exit code or error of a command, and its stdout."""
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(io.StringIO()):
        try:
            code = cli.main([str(argument) for argument in arguments], prog_name="ckpt", standalone_mode=False) or 0
        except SystemExit as error:
            code = error.code
        except Exception as error:
            return f"{type(error).__name__}: {error}", out.getvalue()
    return str(code), out.getvalue()


def digest(path: Path) -> str | None:
    """Of the names and bytes of a file, or of all files of a folder."""
    if not path.exists():
        return None
    state = hashlib.blake2b(digest_size=16)
    for file in sorted([path] if path.is_file() else path.rglob("*")):
        if file.is_file():
            state.update(str(file.relative_to(path.parent)).encode())
            state.update(file.read_bytes())
    return state.hexdigest()


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def samples() -> list[Path]:
    return sorted(p for p in SAMPLES.iterdir() if p.is_dir() and p.name not in ("damaged", "__pycache__"))


def of_samples(folder: Path, values: bool) -> Iterator[tuple[str, list[str | None]]]:
    target = folder / "out"
    for sample in samples():
        yield f"inspect {sample.name}", [*run("inspect", sample, "--json")]
        yield f"verify {sample.name}", [run("verify", sample)[0]]
        for name in TARGETS:
            for command, more in (("convert", ()), ("reshard", ("--dp", "3"))):
                if command == "reshard" and name not in RESHARDED:
                    continue
                code, _ = run(command, sample, target, "--to", name, *more)
                yield f"{command} {sample.name} {name}", [code, *stored(target, folder, values and name == "universal")]
                remove(target)
        code, _ = run("compress", sample, target)
        yield f"compress {sample.name}", [code, *stored(target, folder, values)]
        remove(target)
    for sample in sorted((SAMPLES / "damaged").iterdir()):
        yield f"damaged {sample.name}", [run("verify", sample)[0]]


def stored(target: Path, folder: Path, values: bool) -> list[str | None]:
    """The digest of what was written; or of its values, as safetensors have them."""
    if not values:
        return [digest(target)]
    again = folder / "values"
    code, _ = run("convert", target, again, "--to", "torch")
    content = digest(again)
    remove(again)
    return [code, content]


def of_recorded(folder: Path) -> Iterator[tuple[str, list[str | None]]]:
    """Steps of a recorded run, restored from its log of gradients."""
    for sample in samples():
        if not sample.name.startswith("recorded"):
            continue
        for chain in sorted(p.parent for p in sample.rglob("chain.json")):
            for step in range(8):
                target = folder / "restored"
                code, _ = run("restore", chain, target, "--step", step, "--to", "safetensors")
                yield f"restore {chain.relative_to(SAMPLES)} {step}", [code, digest(target)]
                remove(target)


def write_weights(path: Path, seed: int, scale: float) -> None:
    """A safetensors file of four tensors, written without any library."""
    common, own, header, data = np.random.default_rng(7), np.random.default_rng(seed), {}, b""
    for name, shape, tag in (
        ("a.weight", (300, 512), "F32"),
        ("b.weight", (256, 700), "BF16"),
        ("b.bias", (700,), "F32"),
        ("c.weight", (64, 300), "F16"),
    ):
        change = scale * own.standard_normal(shape) * (own.random(shape) < 0.5)
        values = (common.standard_normal(shape) + change).astype(np.float32)
        forms = {"F32": values, "F16": values.astype(np.float16), "BF16": (values.view(np.uint32) >> 16).astype("<u2")}
        raw = forms[tag].tobytes()
        header[name] = {"dtype": tag, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def append(chain: Path, state: Path, step: int, *more: str) -> str:
    if "append" in cli.list_commands(None):  # type: ignore[arg-type]
        return run("append", chain, state, "--step", step, *more)[0]
    return run("append", chain, state, "--step", step, *more)[0]


def of_chains(folder: Path, values: bool) -> Iterator[tuple[str, list[str | None]]]:
    for i, scale in enumerate((0, 1e-4, 3e-2)):
        write_weights(folder / f"w{i}.safetensors", i, scale)
    for name, more in CODINGS.items():
        chain = folder / f"chain-{name}"
        codes = [append(chain, folder / f"w{i}.safetensors", i, *more) for i in range(3)]
        restored = [folder / f"restored-{name}-{i}" for i in range(3)]
        codes += [run("restore", chain, t, "--step", i, "--to", "safetensors")[0] for i, t in enumerate(restored)]
        members = [] if values else [digest(member) for member in sorted(chain.iterdir()) if member.is_dir()]
        yield f"chain {name}", [*codes, *members, *map(digest, restored)]
    code, out = run("diff", SAMPLES / "deepspeed-0.19-zero1-bf16-dp2", SAMPLES / "universal-1-plain")
    yield "diff", [code, hashlib.blake2b(out.encode()).hexdigest()]


def collect(values: bool) -> dict[str, list[str | None]]:
    folder = Path(tempfile.mkdtemp())
    try:
        results = {}
        for part in (of_samples(folder, values), of_recorded(folder), of_chains(folder, values)):
            for name, result in part:
                results[name] = [r and r.replace(str(SAMPLES), "S").replace(str(folder), "T") for r in result]
        return results
    finally:
        shutil.rmtree(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--compare", type=Path)
    parser.add_argument("--values", action="store_true")
    arguments = parser.parse_args()
    results = collect(arguments.values)
    arguments.output.write_text(json.dumps(results, indent=1, sort_keys=True))
    print(f"{len(results)} results")
    if arguments.compare is None:
        return 0
    before = json.loads(arguments.compare.read_text())
    unequal = sorted(name for name in results.keys() | before.keys() if results.get(name) != before.get(name))
    for name in unequal:
        print(f"{name}\n  before {before.get(name)}"[:400] + f"\n  after  {results.get(name)}"[:400])
    print(f"{len(unequal)} differ from {arguments.compare}")
    return 1 if unequal else 0


if __name__ == "__main__":
    sys.exit(main())
