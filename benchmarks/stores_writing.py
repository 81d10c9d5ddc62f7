"""Converting into an object store: `python benchmarks/stores_writing.py --gigabytes 0.5 --rounds 3`.

DeepSpeed's ZeRO-1 state (`big_zero.py`) is converted to the universal format on the disk, on the disk and then uploaded
with obstore as the tools of stores do (`upload` is this part alone), and into SeaweedFS on this machine.
A proxy adds 30 ms to each request. Client, server and proxy share the cores here, so rates are lower bounds, and the
ratios count. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from measure import in_turn, medians, size
from stores import CKPT, HERE, delayed, seaweedfs

UPLOAD = """
import sys, uuid, obstore
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from obstore.store import from_url
store, source = from_url("s3://bucket", client_options={"allow_http": True}), Path(sys.argv[1])
key = uuid.uuid4().hex
def put(file):
    obstore.put(store, f"{key}/{file.relative_to(source).as_posix()}", file)
with ThreadPoolExecutor(8) as pool:
    list(pool.map(put, [file for file in source.rglob("*") if file.is_file()]))
"""
INTO_STORE = """
import sys, uuid
from ckpt_cli.main import run
sys.argv[1:] = ["convert", sys.argv[1], f"s3://bucket/{uuid.uuid4().hex}"]
run()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        source, converted, out = folder / "zero", folder / "converted", folder / "out"
        command = [sys.executable, str(HERE / "big_zero.py"), str(source), "--gigabytes", str(options.gigabytes)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        subprocess.run([*CKPT, "convert", str(source), str(converted)], check=True, stderr=subprocess.DEVNULL)
        (folder / "data").mkdir()
        out.mkdir()
        nbytes = size(converted)
        print(f"{nbytes / 1e9:.2f} GB, {options.rounds} rounds; medians", flush=True)
        programs = {
            "to the disk": [*CKPT, "convert", str(source), str(out / "target")],
            "upload": [sys.executable, "-c", UPLOAD, str(converted)],
            "to the store": [sys.executable, "-c", INTO_STORE, str(source)],
        }
        with seaweedfs(folder / "data") as server, delayed(server, 0.03) as far:
            for title, place in (("the store", server), ("30 ms a request", far)):
                runs, _ = in_turn(programs, options.rounds, out, {**os.environ, **place.environment})
                for name, several in runs.items():
                    middle = medians(several)
                    print(
                        f"{title:20}{name:16}{middle.wall:7.2f} s {nbytes / 1e6 / middle.wall:6.0f} MB/s "
                        f"{middle.cpu / nbytes * 1e9:5.2f} CPU s/GB {middle.process / 1e6:6.0f} MB",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
