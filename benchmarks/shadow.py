"""What a shadow takes in on one core: a log of 16 M parameters, followed end to end, beside a restore of its last step.

    python benchmarks/shadow.py [FOLDER]

Each step is read, its hashes are compared, it is decoded and applied, with one thread; "over a socket" the log is
fetched from `ckpt serve` first. Gradients are float32 as drawn (their mantissas are stored as they are), float32 of
training in bfloat16 (coded), or those of a top-k hook (coded). CPU seconds of the shadow's process count, since other
work may run beside; the best of three. Those of the server are stated for each GB.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from ckpt.pipeline import Execution
from ckpt.shadow.mirror import LogMirror
from ckpt.shadow.shadow import Shadow
from ckpt_codecs.gradients import gradient_codec
from ckpt_formats.containers.typed_json import encode
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.tensor import Array
from ckpt_formats.universal.chain import chain_file
from ckpt_formats.universal.chain.chain_file import ChainIndex, LoggedSteps
from ckpt_formats.universal.gradients import layout as layouts
from ckpt_formats.universal.gradients.layout import (
    LoggedOptimizer,
    LoggedTensor,
    OptimizerVector,
    RankLayout,
    SegmentLayout,
    VectorPart,
)
from ckpt_formats.universal.gradients.record import FileHead, Kind, hash_values, record_parts
from ckpt_formats.universal.gradients.segment import open_segment, rank_file
from ckpt_formats.universal.gradients.state import replay_to

TENSORS, SIZE, STEPS = 16, 1 << 20, 12
GROUP = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "decoupled_weight_decay": True}


def gradients(kind: str, random: np.random.Generator) -> Array:
    values = random.standard_normal(TENSORS * SIZE, np.float32) * np.float32(1e-3)
    if kind == "bf16":
        values = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    if kind == "top 1 %":
        values[random.random(values.size, np.float32) > 0.01] = 0
    return values


def write_log(run: Path, kind: str) -> tuple[float, int]:
    """Write the chain. Returns the bytes of each parameter and step, and the length of the file before the steps."""
    names = tuple(f"w{i}" for i in range(TENSORS))
    parts = tuple(VectorPart(i, i, 0, SIZE, SIZE, Box.whole((SIZE,))) for i in range(TENSORS))
    rank = RankLayout((OptimizerVector(0, 0, 0),) * TENSORS, parts)
    optimizer = LoggedOptimizer("torch.optim.adamw.AdamW", "adam-fused", "exact", {}, (names,))
    tensors = tuple(LoggedTensor(name, "float32", (SIZE,)) for name in names)
    layout = SegmentLayout("run", 0, "exact", tensors, (optimizer,), (rank,), {}, {}, None)
    folder, content = run / "gradients-0000000000", layouts.dump(layout)
    folder.mkdir(parents=True)
    (folder / layouts.NAME).write_bytes(content)
    random, codec, nbytes = np.random.default_rng(0), gradient_codec("exact"), 0
    values = gradients(kind, random)
    state = random.standard_normal(values.size, np.float32)
    bounds = [rank.chunk_bounds(i) for i in range(rank.chunk_count)]

    def coded(array: Array) -> tuple[list[bytes], list[int]]:
        chunks = [array[low:high] for low, high in bounds]
        return [bytes(codec.encode(chunk, None)) for chunk in chunks], list(map(hash_values, chunks))

    with (folder / rank_file(0)).open("wb") as file:
        head = FileHead(0, 1, 0, layouts.identity(content)).dump()
        file.write(head)
        previous = int.from_bytes(head[56:], "little")
        starts = {"param": state, "exp_avg": np.zeros_like(state), "exp_avg_sq": np.zeros_like(state)}
        for name, array in starts.items():
            parts_, previous = record_parts(Kind.STATE, 0, {"state": name}, *coded(array), previous)
            file.writelines(parts_)
        digests = {name: coded(array)[1] for name, array in starts.items()}
        parts_, previous = record_parts(Kind.FINGERPRINT, 0, {"digests": digests}, [], [], previous)
        file.writelines(parts_)
        start = file.tell()
        chunks = coded(values)
        nbytes = sum(map(len, chunks[0]))
        for step in range(1, STEPS + 1):
            parts_, previous = record_parts(Kind.GRADIENTS, step, {"groups": encode([GROUP])}, *chunks, previous)
            file.writelines(parts_)
    line = LoggedSteps(folder.name, "run", 0, None, None, "2026-01-01T00:00:00Z")
    (run / chain_file.NAME).write_bytes(chain_file.dump(ChainIndex((), (line,))))
    return nbytes / values.size, start


def follow(run: Path, start: int, url: str | None = None) -> float:
    """CPU seconds to read, check and apply all steps, without loading the start. `url`: where the chain is served."""
    path = run / "gradients-0000000000" / rank_file(0)
    content = path.read_bytes()
    os.truncate(path, start)
    with ExitStack() as stack:
        if url is None:
            shadow = Shadow(run, resources=Execution(workers=1))
        else:
            shadow = Shadow(
                stack.enter_context(LogMirror(url, place=run.parent / "mirror")), resources=Execution(workers=1)
            )
        while shadow.step is None:
            shadow.poll()
        with path.open("ab") as file:
            file.write(content[start:])
        began = time.process_time()
        while shadow.step != STEPS:
            shadow.poll()
        return time.process_time() - began


@contextmanager
def served(run: Path) -> Iterator[tuple[str, Callable[[], float]]]:
    """The URL of a server of the chain in a process of its own, and how many CPU seconds that has taken."""
    command = [sys.executable, "-m", "ckpt_cli", "serve", str(run), "--listen", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        url = json.loads(child.stdout.readline())["address"]

        def spent() -> float:
            fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

        yield url, spent
        child.kill()


def restore(run: Path) -> float:
    """CPU seconds to compute the last step, without writing it."""
    began = time.process_time()
    segment = open_segment(run / "gradients-0000000000", check=True)
    replay = replay_to(segment, STEPS, None)
    with Reader(check=False) as reader:
        for number in range(segment.layout.ranks[0].chunk_count):
            replay.chunk(0, number, reader)
    return time.process_time() - began


def main() -> None:
    place = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    for kind in ("float32", "bf16", "top 1 %"):
        run = place / f"{kind.replace(' ', '')}.chain"
        nbytes, start = write_log(run, kind)
        follow(run, start)
        followed, restored = min(follow(run, start) for _ in range(3)), min(restore(run) for _ in range(3))
        with served(run) as (url, spent):
            follow(run, start, url)
            before = spent()
            fetched = min(follow(run, start, url) for _ in range(3))
            serving = (spent() - before) / (3 * (run / "gradients-0000000000" / rank_file(0)).stat().st_size / 1e9)
        total = TENSORS * SIZE * STEPS / 1e6
        rates = {"shadow": followed, "over a socket": fetched, "restore": restored}
        figures = {name: round(total / seconds) for name, seconds in rates.items()}
        row = {"gradients": kind, "B/param": round(nbytes, 2), "Mparam/s of a core": figures}
        print(json.dumps(row | {"server's CPU s/GB": round(serving, 2)}), flush=True)
        shutil.rmtree(run)


if __name__ == "__main__":
    main()
