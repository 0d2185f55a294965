"""Networks for exact curvature without gradients: what a residual network is made of, and odd ones."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from cases import Doubled, Summed


class Residual(nn.Module):
    """Two convolutions with BatchNorm around a shortcut, which is a strided convolution where shapes change."""

    def __init__(self, inside, outside, stride=1):
        super().__init__()
        self.a = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.b = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.first, self.second = nn.BatchNorm2d(outside), nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        same = inside == outside and stride == 1
        self.shortcut = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))
        )

    def forward(self, x):
        z = self.second(self.b(self.relu(self.first(self.a(x)))))
        return self.relu(z + self.shortcut(x))


class ResNet(nn.Module):
    """Convolutions, BatchNorm, pooling, residual connections, and one convolution used twice."""

    def __init__(self, width=4, outputs=1):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.blocks = nn.Sequential(Residual(width, width), nn.MaxPool2d(2), Residual(width, 2 * width, 2))
        self.twice = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.head = nn.Linear(2 * width, outputs)

    def forward(self, x):
        x = self.blocks(self.stem(x))
        x = torch.tanh(self.twice(torch.tanh(self.twice(x))))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Odd(nn.Module):
    """Tensors that no layer's signal explains (used by hand, grouped, of the module's own), and one in two layers."""

    def __init__(self, outputs=1):
        super().__init__()
        self.grouped = nn.Conv2d(4, 4, 3, groups=2)
        self.by_hand = nn.Linear(16, 6)
        self.tied, self.again = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.again.weight = self.tied.weight
        self.norm, self.group = nn.LayerNorm(6), nn.GroupNorm(2, 4)
        self.conv1d = nn.Conv1d(1, 2, 3)
        self.scale = nn.Parameter(torch.randn(6))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.out = nn.Linear(8, outputs)

    def forward(self, x):  # (n, 4, 4, 4)
        x = torch.tanh(self.group(self.grouped(x))).flatten(1)  # (n, 16)
        x = torch.tanh(F.linear(x, self.by_hand.weight, self.by_hand.bias))
        x = self.norm(self.frozen(self.again(torch.tanh(self.tied(x))))) * self.scale
        return self.out(torch.tanh(self.conv1d(x.unsqueeze(1)).flatten(1)))


class Frames(nn.Module):
    """Layers that see several positions or images a row."""

    def __init__(self, outputs=1):
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, stride=2, padding="valid", dilation=1)
        self.reflect = nn.Conv2d(3, 3, 3, padding=1, padding_mode="reflect")
        self.token, self.out = nn.Linear(12, 5), nn.Linear(5, outputs)

    def forward(self, x):  # (n, frames, 5, 5)
        n, frames = x.shape[:2]
        z = torch.tanh(self.reflect(torch.tanh(self.conv(x.flatten(0, 1).unsqueeze(1)))))
        return self.out(torch.tanh(self.token(z.view(n, frames, 12))).mean(1))


def mlp(outputs=1):
    return nn.Sequential(
        nn.Linear(5, 30), nn.GELU(), nn.Linear(30, 20), nn.LayerNorm(20), nn.Tanh(), nn.Linear(20, outputs)
    )


def derived(outputs=1):
    """Layers of classes that do with their weights what nn.Linear does not."""
    layers = nn.Linear(5, 30), nn.GELU(), Doubled(30, 20), nn.Tanh(), Summed(20, 9), nn.Linear(1, outputs)
    return nn.Sequential(*layers)


# name -> how it is made, and the shape of a row
LARGE = {
    "mlp": (mlp, (5,)),
    "resnet": (lambda outputs: ResNet(4, outputs), (2, 12, 12)),
    "derived": (derived, (5,)),
    "odd": (Odd, (4, 4, 4)),
    "frames": (Frames, (3, 5, 5)),
}


def large(name, rows=14, outputs=1, seed=0, dtype=torch.float64):
    """A network with running statistics that are not 0 and 1, and some rows for it."""
    torch.manual_seed(seed)
    make, shape = LARGE[name]
    model = make(outputs)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.2, 0.2)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
            nn.init.uniform_(module.weight, 0.5, 2.0)
    return model.to(dtype).eval(), torch.randn(rows, *shape).to(dtype)
