"""What a load of many ranks exchanges, simulated in one process: the part `ranks` of `jobs.py`.

Each rank has an equal share of every tensor. Rank 0 joins most: it gets the evidence of its children, each of which has
joined that of all ranks up to the next child. All values are zeros, so the checksums of any range are known; bytes are
counted with random checksums, which compress less. Seconds are those of CPUs.
"""

from __future__ import annotations

import json
import time
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import ckpt
from ckpt.reading.evidence import COVERED, ReadEvidence, file_rows
from ckpt_formats.core.checkpoint import Checkpoint, Origin, Parameter
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.evidence import NUMBER, RANGE, Evidence, seal_number
from ckpt_formats.core.seals import Seal
from ckpt_formats.core.tensor import FileBlob, Tensor
from ckpt_training.ranks import children_of

STATES = ("master", "exp_avg", "exp_avg_sq")
COLUMNS = 32


def run(folder: Path, world: int, tensors: int) -> dict[str, Any]:
    """The seconds of the ranks that join most, and the bytes that rank 0 receives."""
    checkpoint, seals = _checkpoint(folder / "zeros", world, tensors)
    row = COLUMNS * 4
    with ckpt.Reading(checkpoint, resources=ckpt.Resources(workers=1)) as reading:
        blocks = [tensor.block[:1] for _, _, tensor in checkpoint.tensors()]
        reading.fill((one, np.empty(one.shape, one.dtype)) for one in blocks)
        began = time.process_time()
        own = reading.evidence()
        seconds_of_own = time.process_time() - began
        starts = [*children_of(0, world), world]
        received = [_evidence(checkpoint, seals, low * row, high * row) for low, high in pairwise(starts)]
        began = time.process_time()
        reading.evidence(received[:-1])
        seconds_of_child = time.process_time() - began
        began = time.process_time()
        verification = reading.verify(received)
        seconds = time.process_time() - began
    assert (verification.seals, verification.unverified) == (len(seals), ())
    names = json.dumps(list(checkpoint.parameters)).encode()
    return {
        "ranks": world,
        "tensors": len(seals),
        "evidence_of_a_rank": len(own),
        "messages": len(received),
        "bytes_received_by_rank_0": sum(
            len(_evidence(checkpoint, seals, low * row, high * row, are_random=True)) for low, high in pairwise(starts)
        ),
        "bytes_of_all_names": len(names) * len(received),
        "seconds_of_own_evidence": seconds_of_own,
        "seconds_to_join_half": seconds_of_child,
        "seconds_of_rank_0": seconds,
    }


def table(row: dict[str, Any]) -> str:
    return "\n".join(f"{name.replace('_', ' '):28}{value:12,.2f}" for name, value in row.items())


def _checkpoint(path: Path, world: int, tensors: int) -> tuple[Checkpoint, list[Seal]]:
    """Tensors of a row for each rank, in a file with holes."""
    shape, nbytes, float32 = (world, COLUMNS), world * COLUMNS * 4, DTYPES["float32"]
    checksum, parameters, seals = zlib.crc32(bytes(nbytes)), dict[str, Parameter](), list[Seal]()
    for number in range(tensors):
        states = {}
        for state in STATES:
            seals.append(Seal(path, nbytes * len(seals), nbytes, "crc32", checksum, f"layers.{number}/{state}"))
            states[state] = Tensor.of(FileBlob.packed(path, seals[-1].offset, shape, float32, seals[-1]))
        name = f"model.layers.{number}.self_attention.weight"
        parameters[name] = Parameter(name, "parameter", states)
    with path.open("wb") as file:
        file.truncate(nbytes * len(seals))
    return Checkpoint(path=path, origin=Origin("universal"), parameters=parameters), seals


def _evidence(checkpoint: Checkpoint, seals: list[Seal], start: int, stop: int, *, are_random: bool = False) -> bytes:
    """That of ranks next to each other, joined: one range of each tensor."""
    digests = np.full(len(seals), zlib.crc32(bytes(stop - start)))
    if are_random:
        digests = np.random.default_rng(start).integers(0, 1 << 32, len(seals))
    numbers = [seal_number(seal) for seal in seals]
    rows = np.array([(number, start, stop, int(one)) for number, one in zip(numbers, digests, strict=True)], RANGE)
    covered = np.array([(number, start, stop) for number in numbers], COVERED)
    identities = [(path, one) for path, one in checkpoint.identities.items()]
    matched = np.empty(0, NUMBER).tobytes()
    return ReadEvidence(Evidence(rows.tobytes(), matched), covered, file_rows(identities)).to_bytes()
