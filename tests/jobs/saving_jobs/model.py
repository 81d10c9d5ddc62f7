"""The model of saved and published runs of one process."""

import torch
from torch import nn


class Model(nn.Module):
    """With tied weights, buffers, a frozen parameter, a scalar, an empty tensor and a matrix in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.word = nn.Embedding(13, 6)
        self.mix = nn.Conv2d(2, 300, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.word.weight
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.frozen = nn.Parameter(torch.randn(5).to(torch.bfloat16), requires_grad=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.word(tokens))
        scores: torch.Tensor = self.head(x) * self.mix(x.reshape(1, 2, -1, 3)).mean() * self.gain
        return scores
