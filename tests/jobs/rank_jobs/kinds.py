"""The kinds of per-rank files that FSDP jobs write, as data. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Kind:
    """One job and the way it saves.

    `shards` ranks cut every parameter, `replicas` such sets hold the same, and `tp` ranks cut the linear layers. With
    "ddp" nothing is cut. `optimizer`: "named" by FSDP's own functions, "raw" by `optimizer.state_dict()`.
    """

    name: str
    wrapper: Literal["fsdp2", "fsdp1", "ddp"] = "fsdp2"
    shards: int = 2
    replicas: int = 1
    tp: int = 1
    inner: int = 10
    state: Literal["sharded", "local"] = "sharded"
    """FSDP1's kind of state dict."""
    orig: bool = True
    """FSDP1's `use_orig_params`."""
    mesh: bool = False
    """FSDP1 is given a mesh, and saves DTensors."""
    optimizer: Literal["named", "raw", "none"] = "named"
    saver: Literal["verl", "accelerate"] = "verl"
    """As verl does it, by hand, or by Accelerate itself."""
    compiled: bool = False
    tied: bool = False

    @property
    def world(self) -> int:
        return self.shards * self.replicas * self.tp


_ALL = (
    Kind("fsdp2_w2"),
    Kind("fsdp2_w3_raw", shards=3, optimizer="raw"),
    Kind("fsdp2_w4_compiled", shards=4, compiled=True),
    Kind("fsdp2_w2_tied", tied=True),
    Kind("fsdp2_w2_accelerate", saver="accelerate"),
    Kind("fsdp2_tp_2x2", tp=2, inner=12),
    Kind("fsdp2_tp_3x2_uneven", shards=3, tp=2, inner=7),
    Kind("fsdp2_hsdp_2x2", replicas=2),
    Kind("fsdp1_w2", "fsdp1"),
    Kind("fsdp1_w3_flat", "fsdp1", shards=3, orig=False),
    Kind("fsdp1_w2_mesh", "fsdp1", mesh=True, saver="accelerate"),
    Kind("fsdp1_w2_raw", "fsdp1", optimizer="raw"),
    Kind("fsdp1_w2_flat_raw", "fsdp1", orig=False, optimizer="raw"),
    Kind("fsdp1_hsdp_2x2", "fsdp1", replicas=2),
    Kind("fsdp1_hsdp_2x2_raw", "fsdp1", replicas=2, optimizer="raw"),
    Kind("fsdp1_hsdp_2x2_mesh_raw", "fsdp1", replicas=2, mesh=True, optimizer="raw"),
    Kind("fsdp1_local_w2", "fsdp1", state="local"),
    Kind("fsdp1_local_w3_raw", "fsdp1", shards=3, state="local", optimizer="raw"),
    Kind("fsdp1_local_w2_flat", "fsdp1", state="local", orig=False),
    Kind("fsdp1_local_w2_accelerate", "fsdp1", state="local", saver="accelerate"),
    Kind("fsdp1_local_w2_bare", "fsdp1", state="local", optimizer="none", saver="accelerate"),
    Kind("ddp_w2", "ddp", optimizer="raw"),
)
KINDS = {kind.name: kind for kind in _ALL}
