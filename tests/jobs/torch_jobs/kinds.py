"""The kinds of checkpoints that PyTorch's own distributed training writes, as data.

A training is run once and its state saved in several ways; a kind is one training and one way. Nothing here imports
torch, so a test module can be parametrised over the kinds without paying for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

Options = Mapping[str, object]


@dataclass(frozen=True)
class Training:
    """How a small model is trained.

    `shards` ranks each hold a part of every parameter; `replicas` such sets hold the same (HSDP; with "ddp", which cuts
    nothing, every rank is one). The linear layers of each part are cut over `tp` ranks.
    """

    name: str
    wrapper: Literal["fsdp2", "fsdp1", "ddp", "none"] = "fsdp2"
    shards: int = 2
    replicas: int = 1
    tp: int = 1
    model: Literal["llama", "gpt"] = "llama"
    dtype: Literal["fp32", "bf16"] = "fp32"
    optimizer: Literal["adamw", "amsgrad", "sgd"] = "adamw"
    groups: int = 2
    tied: bool = False
    frozen: bool = False
    scheduler: bool = True
    steps: int = 5
    hidden: int = 48
    layers: int = 2

    @property
    def dp(self) -> int:
        """Over how many the batch is divided."""
        return self.shards * self.replicas

    @property
    def world(self) -> int:
        return self.dp * self.tp

    def saved(self, way: Way) -> Kind:
        return Kind(self, way)


@dataclass(frozen=True)
class Way:
    """How a state is saved.

    `keys`: "nested" as in PyTorch's tutorials; "torchtitan" with the model's names at the top level and a flat
    optimizer; "raw" by the `state_dict` of the modules themselves, whose optimizer numbers its parameters; "accelerate"
    in Accelerate's two folders. `writer` are options of `FileSystemWriter`.
    """

    name: str = "nested"
    keys: Literal["nested", "torchtitan", "raw", "accelerate"] = "nested"
    writer: Options = field(default_factory=dict, hash=False)
    zstd: bool = False
    collectives: bool = True
    asynchronous: bool = False
    over: str | None = None
    """The kind whose folder is written over: what it had more of stays."""


@dataclass(frozen=True)
class Kind:
    training: Training
    way: Way

    def __str__(self) -> str:
        return f"{self.training.name}-{self.way.name}"


NESTED = Way()
TORCHTITAN = Way("torchtitan", "torchtitan")
RAW = Way("raw", "raw")
WRITERS = (
    Way("async", asynchronous=True),
    Way("threads", writer={"thread_count": 3}),
    Way("file_per_item", writer={"single_file_per_rank": False}),
    Way("no_collectives", collectives=False),
    Way("zstd", zstd=True),
    Way("over_larger_world", over="fsdp2_w4-nested"),
    Way("accelerate", "accelerate"),
)

FSDP2 = Training("fsdp2")
# The one of world 4 comes before the one of world 2 that is written over it.
ZOO: Mapping[Training, tuple[Way, ...]] = {
    replace(FSDP2, name="fsdp2_w4", shards=4): (NESTED, TORCHTITAN),
    replace(FSDP2, name="fsdp2_w1", shards=1): (NESTED,),
    replace(FSDP2, name="fsdp2_w2"): (NESTED, TORCHTITAN, *WRITERS),
    replace(FSDP2, name="fsdp2_w3_tied_frozen", shards=3, tied=True, frozen=True): (NESTED,),
    replace(FSDP2, name="fsdp2_w2_tp2", tp=2): (NESTED, TORCHTITAN),
    replace(FSDP2, name="fsdp2_w2_tp2_tied_frozen", tp=2, tied=True, frozen=True): (NESTED,),
    replace(FSDP2, name="hsdp_2x2", replicas=2): (NESTED,),
    replace(FSDP2, name="fsdp2_w2_bf16", dtype="bf16"): (NESTED,),
    replace(FSDP2, name="fsdp2_w2_sgd", optimizer="sgd", groups=1): (NESTED, TORCHTITAN),
    replace(FSDP2, name="fsdp2_w3_amsgrad", shards=3, optimizer="amsgrad"): (NESTED,),
    Training("fsdp1_w2", "fsdp1", tied=True): (NESTED,),
    Training("ddp_w2", "ddp", shards=1, replicas=2, tied=True, frozen=True): (NESTED, RAW),
}

TRAININGS: dict[str, Training] = {training.name: training for training in ZOO}
KINDS: dict[str, Kind] = {
    str(Kind(training, way)): Kind(training, way) for training, ways in ZOO.items() for way in ways
}
