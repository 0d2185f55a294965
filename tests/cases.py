"""The networks that tests run over: a new kind of module is tested by adding a line here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Network2d(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


class Tied(nn.Module):
    """One weight in two layers, one layer used twice."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 2)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.out(torch.tanh(self.b(torch.tanh(self.a(torch.tanh(self.a(x)))))))


class Tokens(nn.Module):
    """A linear layer over several positions a row, with attention between them."""

    def __init__(self):
        super().__init__()
        self.q, self.v, self.out = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(3, 1)

    def forward(self, x):  # (n, T, 4)
        weights = torch.softmax(self.q(x) @ x.mT, -1)
        return self.out(torch.tanh(weights @ self.v(x))).mean(1)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.LSTM(4, 3, batch_first=True), nn.Linear(3, 1)

    def forward(self, x):
        return self.out(self.cell(x)[0][:, -1])


class Scaled(nn.Module):
    """A parameter of its own beside linear layers, and a flat output."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 1), nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return (self.scale * torch.tanh(self.layer(x))).squeeze(1)


class Doubled(nn.Linear):
    """Its weight counts twice."""

    def forward(self, x):
        return F.linear(x, 2 * self.weight, self.bias)


class Summed(nn.Linear):
    """It gives other shapes than a linear layer does."""

    def forward(self, x):
        return F.linear(x, self.weight, self.bias).sum(-1, keepdim=True)


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    row_shape: tuple[int, ...]
    way: str


NETWORKS = {
    "linear": Case(lambda: nn.Linear(4, 1), (4,), "linear layers"),
    "mlp": Case(lambda: nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 1)), (5,), "linear layers"),
    "deep, two outputs": Case(
        lambda: nn.Sequential(
            nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6, bias=False), nn.ReLU(inplace=True), nn.Linear(6, 2)
        ),
        (5,),
        "linear layers",
    ),
    "dropout and layer norm without parameters": Case(
        lambda: nn.Sequential(
            nn.Linear(5, 6), nn.LayerNorm(6, elementwise_affine=False), nn.Dropout(0.3), nn.ELU(), nn.Linear(6, 1)
        ),
        (5,),
        "linear layers",
    ),
    "tied": Case(Tied, (4,), "linear layers"),
    "tokens": Case(Tokens, (3, 4), "linear layers"),
    "own parameter": Case(Scaled, (4,), "torch.func"),
    "batch norm": Case(
        lambda: nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1)), (5,), "torch.func"
    ),
    "convolution": Case(
        lambda: nn.Sequential(nn.Conv2d(1, 3, 3), nn.SiLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 2)),
        (1, 6, 6),
        "torch.func",
    ),
    "derived layers": Case(
        lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), Doubled(5, 4), nn.Tanh(), Summed(4, 3)), (4,), "torch.func"
    ),
    "recurrent": Case(Recurrent, (5, 4), "a loop over rows"),
}


def build(name: str, rows: int = 11, seed: int = 0) -> tuple[nn.Module, Tensor]:
    """The named network in float64 with some rows for it."""
    torch.manual_seed(seed)
    case = NETWORKS[name]
    model = case.make().double()
    return model, torch.randn(rows, *case.row_shape, dtype=torch.float64)
