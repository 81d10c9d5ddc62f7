"""Write the golden chain of boxes: `python sample_checkpoints/make_boxes.py`. No engine is needed.

`universal-2-boxes/` is a chain that three ranks of `tests/support/boxed.py` saved: a plain base, a delta of boxes, and
a coded base. `universal-2-boxes.expected.json` has the XXH3-128 of every whole state of each step, computed of the
arrays that the ranks cut, without the code of ckpt. A golden file of a released version is never written again.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import xxhash

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "formats"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "codecs"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from boxed import BoxedRun, states_at
from ckpt_formats.core.state_names import to_stored
from ckpt_formats.universal.chain import chain_file

HERE = Path(__file__).resolve().parent
NAME = "universal-2-boxes"
TIME = "2026-01-01T00:00:00Z"


def main() -> None:
    target = HERE / NAME
    shutil.rmtree(target, ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch:
        run = BoxedRun(target, Path(scratch))
        run.save(1, plain=True)
        run.save(2, delta=True)
        run.save(3, codec="auto")
    chain = chain_file.read(target)
    members = tuple(replace(member, time=TIME) for member in chain.members)
    (target / chain_file.NAME).write_bytes(chain_file.dump(replace(chain, members=members)))
    expected = {
        str(step): {
            f"{name}/{to_stored(state)}": xxhash.xxh3_128_hexdigest(values.tobytes())
            for name, states in states_at(step).items()
            for state, values in states.items()
        }
        for step in (1, 2, 3)
    }
    (HERE / f"{NAME}.expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
