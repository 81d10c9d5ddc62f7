"""A tiny model in Megatron's manner: it cuts its own parameters, and can run as a DeepSpeed pipeline.

Grouped-query attention and SwiGLU give fused parameters of unequal parts; the vocabulary is padded to a multiple that
grows with the tensor-parallel degree, as Megatron's is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, distributed, nn
from torch.nn import functional

from engines.cuts import MEGATRON, VOCABULARY, cut_of
from engines.kinds import Kind
from engines.model import LENGTH, fill

HEADS = 8
KEY_VALUE_HEADS = 4


@dataclass(frozen=True)
class Mesh:
    """Where this process stands among the ranks, and the groups it shares with its peers."""

    topology: PipeModelDataParallelTopology
    tp: int
    dp: int
    tp_rank: int
    dp_rank: int
    pp_rank: int
    tp_group: Any
    dp_group: Any

    @classmethod
    def of(cls, kind: Kind) -> Mesh:
        """Create the groups; collective, since every process must take part in the making of every group."""
        topology = PipeModelDataParallelTopology(num_pp=kind.pp, num_mp=kind.tp, num_dp=kind.dp)
        here = topology.get_coord(distributed.get_rank())

        def group(axis: str) -> Any:
            lists = topology.get_axis_comm_lists(axis) or [[rank] for rank in range(kind.world)]
            mine = [(distributed.new_group(ranks), ranks) for ranks in lists]
            return next(group for group, ranks in mine if distributed.get_rank() in ranks)

        return cls(topology, kind.tp, kind.dp, here.model, here.data, here.pipe, group("model"), group("data"))

    def get_model_parallel_rank(self) -> int:
        return self.tp_rank

    def get_model_parallel_world_size(self) -> int:
        return self.tp

    def get_model_parallel_group(self) -> Any:
        return self.tp_group

    def get_data_parallel_rank(self) -> int:
        return self.dp_rank

    def get_data_parallel_world_size(self) -> int:
        return self.dp

    def get_data_parallel_group(self) -> Any:
        return self.dp_group

    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_group = get_model_parallel_group
    get_slice_parallel_rank = get_model_parallel_rank
    get_slice_parallel_world_size = get_model_parallel_world_size

    def get_pipeline_model_parallel_rank(self) -> int:
        return 0

    def get_pipeline_model_parallel_world_size(self) -> int:
        return 1


class _Enter(torch.autograd.Function):
    """Into a region where each tensor-parallel rank works on its own columns: gradients are summed on the way back."""

    @staticmethod
    def forward(context: Any, x: Tensor, mesh: Mesh) -> Tensor:
        context.mesh = mesh
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()
        distributed.all_reduce(gradient, group=context.mesh.tp_group)
        return gradient, None


class _Leave(torch.autograd.Function):
    """Out of such a region: the ranks' partial results are summed."""

    @staticmethod
    def forward(context: Any, x: Tensor, mesh: Mesh) -> Tensor:
        total = x.clone()
        distributed.all_reduce(total, group=mesh.tp_group)
        return total

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Collect(torch.autograd.Function):
    """Lay the ranks' columns side by side."""

    @staticmethod
    def forward(context: Any, x: Tensor, mesh: Mesh) -> Tensor:
        context.mesh = mesh
        columns = [torch.empty_like(x) for _ in range(mesh.tp)]
        distributed.all_gather(columns, x.contiguous(), group=mesh.tp_group)
        return torch.cat(columns, -1)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.chunk(context.mesh.tp, -1)[context.mesh.tp_rank].contiguous(), None


def _parameter(mesh: Mesh, key: str, shape: tuple[int, ...], seed: int) -> nn.Parameter:
    """This rank's piece of the parameter `key`, whose full shape is given."""
    cut = cut_of(key, MEGATRON)
    full = fill(key, shape, seed)
    if cut is not None and cut.rows is not None:
        multiple = 4 * mesh.tp
        full = functional.pad(full, (0, 0, 0, -cut.rows % multiple))
    own = full if cut is None else cut.split(full, mesh.tp, mesh.tp_rank)
    parameter = nn.Parameter(own.clone().contiguous())
    parameter.tensor_model_parallel = cut is not None  # type: ignore[attr-defined]
    return parameter


class Linear(nn.Module):
    def __init__(self, mesh: Mesh, key: str, inputs: int, outputs: int, seed: int) -> None:
        super().__init__()
        self.weight = _parameter(mesh, f"{key}.weight", (outputs, inputs), seed)
        self.bias = _parameter(mesh, f"{key}.bias", (outputs,), seed)
        self.mesh = mesh


class Columns(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(_Enter.apply(x, self.mesh), self.weight, self.bias)


class Rows(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return _Leave.apply(functional.linear(x, self.weight), self.mesh) + self.bias


class Norm(nn.Module):
    def __init__(self, mesh: Mesh, key: str, hidden: int, seed: int) -> None:
        super().__init__()
        self.weight = _parameter(mesh, f"{key}.weight", (hidden,), seed)

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight)


class Word(nn.Module):
    def __init__(self, mesh: Mesh, key: str, hidden: int, seed: int) -> None:
        super().__init__()
        self.weight = _parameter(mesh, f"{key}.word.weight", (VOCABULARY, hidden), seed)


class Embedding(nn.Module):
    """The vocabulary-parallel table, and a table of positions which every rank holds whole."""

    def __init__(self, mesh: Mesh, hidden: int, seed: int) -> None:
        super().__init__()
        self.word = Word(mesh, "embedding", hidden, seed)
        self.position = nn.Parameter(fill("embedding.position", (LENGTH, hidden), seed))
        self.mesh = mesh

    @property
    def shared(self) -> nn.Parameter:
        """What a tied head shares with us."""
        return self.word.weight

    def forward(self, tokens: Tensor) -> Tensor:
        rows = len(self.word.weight)
        own = tokens - rows * self.mesh.tp_rank
        elsewhere = (own < 0) | (own >= rows)
        embedded = functional.embedding(own.clamp(0, rows - 1), self.word.weight)
        return _Leave.apply(embedded.masked_fill(elsewhere.unsqueeze(-1), 0), self.mesh) + self.position


class Head(nn.Module):
    def __init__(self, mesh: Mesh, hidden: int, seed: int) -> None:
        super().__init__()
        self.word = Word(mesh, "head", hidden, seed)
        self.mesh = mesh

    def forward(self, x: Tensor) -> Tensor:
        return logits(self, x)


def logits(table: Embedding | Head, x: Tensor) -> Tensor:
    """Scores of the true vocabulary; padding takes no part in the loss."""
    own = functional.linear(_Enter.apply(x, table.mesh), table.word.weight)
    return _Collect.apply(own, table.mesh)[..., :VOCABULARY]


class Attention(nn.Module):
    def __init__(self, mesh: Mesh, key: str, hidden: int, seed: int) -> None:
        super().__init__()
        self.width = hidden // HEADS
        self.qkv = Columns(mesh, f"{key}.qkv", hidden, (HEADS + 2 * KEY_VALUE_HEADS) * self.width, seed)
        self.out = Rows(mesh, f"{key}.out", hidden, hidden, seed)
        self.mesh = mesh

    def forward(self, x: Tensor) -> Tensor:
        fused = self.qkv(x).unflatten(-1, (-1, self.width)).transpose(1, 2)
        queries = HEADS // self.mesh.tp
        others = KEY_VALUE_HEADS // self.mesh.tp
        heads = fused.split([queries, others, others], 1)
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class SwiGlu(nn.Module):
    def __init__(self, mesh: Mesh, key: str, hidden: int, seed: int) -> None:
        super().__init__()
        inner = hidden * 3 // 2
        self.gate_up = Columns(mesh, f"{key}.gate_up", hidden, 2 * inner, seed)
        self.down = Rows(mesh, f"{key}.down", inner, hidden, seed)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(functional.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, mesh: Mesh, key: str, hidden: int, seed: int) -> None:
        super().__init__()
        self.norm1 = Norm(mesh, f"{key}.norm1", hidden, seed)
        self.attention = Attention(mesh, f"{key}.attention", hidden, seed)
        self.norm2 = Norm(mesh, f"{key}.norm2", hidden, seed)
        self.mlp = SwiGlu(mesh, f"{key}.mlp", hidden, seed)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def loss(scores: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(scores.float().flatten(0, 1), targets.flatten())


class Megatron(nn.Module):
    """The model as one module."""

    def __init__(self, mesh: Mesh, kind: Kind, seed: int) -> None:
        super().__init__()
        self.embedding = Embedding(mesh, kind.hidden, seed)
        self.layers = nn.ModuleList(Block(mesh, f"layers.{i}", kind.hidden, seed) for i in range(kind.layers))
        self.norm = Norm(mesh, "norm", kind.hidden, seed)
        self.head = None if kind.tied else Head(mesh, kind.hidden, seed)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return loss(logits(self.head or self.embedding, self.norm(x)), targets)


def pipeline(mesh: Mesh, kind: Kind, seed: int) -> PipelineModule:
    """The same model as a list of layers, which DeepSpeed divides among the stages."""
    shape = (mesh, kind.hidden, seed)
    if kind.tied:
        first = TiedLayerSpec("embedding", Embedding, *shape, tied_weight_attr="shared")
        last = TiedLayerSpec("embedding", Embedding, *shape, forward_fn=logits, tied_weight_attr="shared")
    else:
        first, last = LayerSpec(Embedding, *shape), LayerSpec(Head, *shape)
    blocks = [LayerSpec(Block, mesh, f"layers.{i}", kind.hidden, seed) for i in range(kind.layers)]
    return PipelineModule(
        [first, *blocks, LayerSpec(Norm, mesh, "norm", kind.hidden, seed), last],
        loss_fn=loss,
        topology=mesh.topology,
        partition_method="uniform",
        activation_checkpoint_interval=0,
    )
