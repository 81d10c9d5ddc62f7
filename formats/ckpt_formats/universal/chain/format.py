"""The format of chains: read as the last state, or as the one that a path names."""

from dataclasses import replace
from pathlib import Path

from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.format import Format, ReadOptions
from ckpt_formats.universal.chain import chain_file, members, states
from ckpt_formats.universal.chain.address import Address


class ChainFormat(Format):
    name = "chain"
    summary = "a folder of states of one run, most of them deltas or gradients; read as its last step"
    is_own = True

    def __init__(self, address: Address | None = None) -> None:
        """`address`: the state to read; None: the last one."""
        self._address = address

    def detect(self, path: Path) -> bool:
        return (path / chain_file.NAME).is_file()

    def read(self, path: Path, options: ReadOptions) -> Checkpoint:
        chain = chain_file.load(path / chain_file.NAME)
        if self._address is None and not (chain.is_family or chain.segments or chain.is_published):
            return members.open_last(path, chain)
        step = states.step_of(chain, self._address or Address(path, None))
        return replace(states.open_state(path, chain, step), path=path)
