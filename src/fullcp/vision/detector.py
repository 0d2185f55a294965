"""A network that finds one box an image and tells cats from dogs: backbone, fully connected trunk, two heads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor, nn

from fullcp.vision.vgg import normalized


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Random numbers from the seed inside, and outside as if nothing had happened."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def small_backbone(*, channels: int = 12, seed: int = 0) -> nn.Module:
    """Two convolutions with random weights, for small images and for trying things out."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(3, channels, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv2d(channels, channels + 4, 3, stride=2, padding=1),
            nn.ReLU(),
        )


class BoxHeads(nn.Module):
    """Two fully connected layers on pooled features, a linear head for the box and one for the class.

    Parameters
    ----------
    inputs : number of features.
    trunk : widths of the fully connected layers.
    dropout : after each of them, in training.
    """

    def __init__(self, inputs: int, trunk: Sequence[int] = (4096, 4096), *, dropout: float = 0.5):
        super().__init__()
        widths = [inputs, *trunk]
        self.trunk = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.box, self.label = nn.Linear(widths[-1], 4), nn.Linear(widths[-1], 1)
        self.dropout = dropout
        for layer in self.trunk:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")  # type: ignore[arg-type]
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
        for head in (self.box, self.label):
            nn.init.normal_(head.weight, std=0.01)
            nn.init.zeros_(head.bias)

    def embed(self, x: Tensor) -> Tensor:
        """What goes into the heads, z (n, p), from features (n, inputs)."""
        for layer in self.trunk:
            x = nn.functional.dropout(torch.relu(layer(x)), self.dropout, self.training)
        return x

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Boxes (n, 4) in standardised units, and the logit of a dog (n,)."""
        z = self.embed(x)
        return self.box(z), self.label(z)[:, 0]


class Detector(nn.Module):
    """Images (n, 3, S, S) in uint8, as they come from a loader, to boxes and classes.

    Parameters
    ----------
    backbone : torch.nn.Module
        Images normalised as ImageNet's to feature maps (n, C, h, w).
    size : side S of the images, to find out C with.
    pool : feature maps are averaged to pool x pool.
    trunk, dropout : see `BoxHeads`.
    """

    def __init__(
        self,
        backbone: nn.Module,
        size: int = 224,
        *,
        pool: int = 7,
        trunk: Sequence[int] = (4096, 4096),
        dropout: float = 0.5,
    ):
        super().__init__()
        self.backbone = backbone
        self.pool = nn.AdaptiveAvgPool2d(pool)
        device = next(iter(backbone.parameters()), torch.empty(0)).device
        with torch.no_grad():
            maps = backbone(torch.zeros(1, 3, size, size, device=device))
        if not isinstance(maps, Tensor) or maps.ndim != 4:
            found = tuple(maps.shape) if isinstance(maps, Tensor) else type(maps).__name__
            raise ValueError(f"backbone must give feature maps (n, C, h, w), got {found}")
        with device:
            self.heads = BoxHeads(maps.shape[1] * pool**2, trunk, dropout=dropout)

    def features(self, images: Tensor) -> Tensor:
        """Pooled features (n, C pool^2) of images (n, 3, S, S), uint8."""
        x = normalized(images)
        if x.is_cuda:
            x = x.contiguous(memory_format=torch.channels_last)
        return self.pool(self.backbone(x)).flatten(1)

    def embed(self, images: Tensor) -> Tensor:
        """What goes into the heads, z (n, p)."""
        return self.heads.embed(self.features(images))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Boxes (n, 4) in standardised units, and the logit of a dog (n,)."""
        return self.heads(self.features(images))
