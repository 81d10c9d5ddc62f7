"""Convert a large checkpoint of Orbax, beside `cp -r` and Orbax itself: `orbax_conversion.py [--layers 10]`.

The state is a `TrainState` of Llama's kind in MaxText's names, float32 with both moments of Adam, which Orbax saves
from a mesh of 4 x 2 devices: in zstd, as it does by default, and plain. 12 bytes a parameter, about 220 MB a layer.
The programs run in turn. Printed are medians: seconds of a processor, GB of the source for each, the peak of memory,
and what was written.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from measure import Run, measure, measured_in_turn, medians, size, warm

HERE = Path(__file__).resolve().parent
SIZES = {"HIDDEN": 1024, "INNER": 3072, "HEADS": 16, "GROUPS": 8, "WIDTH": 64, "VOCABULARY": 32_000}
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 1024,
    "head_dim": 64,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32_000,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}


def make(out: Path, layers: int) -> None:
    """Save the state with Orbax, compressed and plain."""
    sys.path.insert(0, str(HERE.parent / "tests/jobs/jax_jobs"))
    import devices
    import jax
    import llama
    import numpy as np
    import orbax.checkpoint as ocp

    for name, value in {**SIZES, "LAYERS": layers}.items():
        setattr(llama, name, value)
    params = llama.parameters()
    states = {"mu": jax.tree.map(lambda x: x * np.float32(0.3), params), "nu": jax.tree.map(np.square, params)}
    tree = {"params": params, "opt_state": [{"count": np.int32(3), **states}], "step": np.int32(3)}
    tree = devices.sharded(tree, devices.mesh_of("4x2"))
    for name, compression in (("zstd", True), ("plain", False)):
        saver = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=compression))
        saver.save(out / name, args=ocp.args.PyTreeSave(tree))
        saver.close()


def by_orbax(source: Path, out: Path) -> None:
    """Restore to the memory of the host and save again, by Orbax itself."""
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    jax.config.update("jax_platforms", "cpu")
    saver = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    arrays = jax.tree.map(lambda _: ocp.RestoreArgs(np.ndarray), saver.metadata(source).item_metadata.tree)
    tree = saver.restore(source, args=ocp.args.PyTreeRestore(restore_args=arrays))
    saver.save(out, args=ocp.args.PyTreeSave(tree))
    saver.close()


def main(layers: int, rounds: int, folder: Path | None) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as place:
        work = Path(place)
        subprocess.run([sys.executable, "-W", "ignore", __file__, "make", work, str(layers)], check=True)
        (work / "model").mkdir()
        (work / "model/config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
        ckpt = [str(Path(sys.executable).with_name("ckpt")), "convert"]
        (scratch := work / "scratch").mkdir()
        out = scratch / "out"
        programs: dict[str, tuple[str, list[str]]] = {"cp -r": ("zstd", ["cp", "-r", str(work / "zstd"), str(out)])}
        again = [sys.executable, "-W", "ignore", __file__, "again", str(work / "zstd"), str(out)]
        programs["orbax: restore, save"] = ("zstd", again)
        for name in ("zstd", "plain"):
            source = str(work / name)
            to_hf = [*ckpt, source, str(out), "--to", "hf", "--config", str(work / "model")]
            programs |= {
                f"{name} -> universal": (name, [*ckpt, source, str(out), "--to", "universal"]),
                f"{name} -> orbax": (name, [*ckpt, source, str(out), "--to", "orbax"]),
                f"{name} -> hf": (name, to_hf),
            }
        programs["universal -> orbax"] = ("universal", [*ckpt, str(work / "universal"), str(out), "--to", "orbax"])
        subprocess.run([*ckpt, str(work / "plain"), str(work / "universal"), "--to", "universal"], check=True)
        measured = {name: partial(_measure, work / source, command) for name, (source, command) in programs.items()}
        runs, written = measured_in_turn(measured, rounds, scratch)
        print(f"{'':22} {'GB':>6} {'CPU s':>7} {'GB/CPU s':>9} {'wall s':>7} {'peak MB':>8}  written GB")
        for name, (source, _) in programs.items():
            run, nbytes = medians(runs[name]), size(work / source)
            speed = nbytes / 1e9 / run.cpu
            text = f"{nbytes / 1e9:6.2f} {run.cpu:7.2f} {speed:9.2f} {run.wall:7.2f} {run.process / 1e6:8.0f}"
            print(f"{name:22} {text}  {written[name] / 1e9:.2f}", flush=True)


def _measure(source: Path, command: list[str]) -> Run:
    warm(source)
    return measure(command)


if __name__ == "__main__":
    if sys.argv[1:2] == ["make"]:
        make(Path(sys.argv[2]), int(sys.argv[3]))
    elif sys.argv[1:2] == ["again"]:
        by_orbax(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        parser = argparse.ArgumentParser(description=__doc__)
        parser.add_argument("--layers", type=int, default=10)
        parser.add_argument("--rounds", type=int, default=3)
        parser.add_argument("--folder", type=Path)
        given = parser.parse_args()
        main(given.layers, given.rounds, given.folder)
