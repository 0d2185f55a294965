"""Images with one box and one class each: what every loader gives, flips that flip the box, images drawn for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

CAT, DOG = 0, 1


@dataclass(frozen=True)
class BoxImages:
    """n images of one size.

    Attributes
    ----------
    images : Tensor (n, 3, S, S), uint8
    boxes : Tensor (n, 4), float32
        Left, top, right and bottom, as shares of the image's width and height.
    classes : Tensor (n,), int64
        `CAT` or `DOG`.
    names : where each image comes from, for messages and pictures.
    known_by : the digest of the images whose pixels were left out, see `without_pixels`.
    """

    images: Tensor
    boxes: Tensor
    classes: Tensor
    names: Sequence[str]
    known_by: str = ""

    def __len__(self) -> int:
        return len(self.images)

    def digest(self) -> str:
        """A fingerprint of images and boxes, by which files know what they were made of."""
        if self.known_by:
            return self.known_by
        sums = self.images.sum((1, 2, 3), dtype=torch.int64) * torch.arange(1, len(self) + 1)
        return f"{len(self)}-{tuple(self.images.shape[1:])}-{int(sums.sum())}-{float(self.boxes.double().sum()):.6f}"

    def without_pixels(self) -> BoxImages:
        """The same rows with images of one pixel, for processes that only want the boxes; the digest stays."""
        return replace(self, images=self.images[:, :, :1, :1].clone(), known_by=self.digest())


def flip_boxes(boxes: Tensor) -> Tensor:
    """The boxes (..., 4) of images flipped from left to right.

    Examples
    --------
    >>> flip_boxes(torch.tensor([0.125, 0.25, 0.5, 0.75])).tolist()
    [0.5, 0.25, 0.875, 0.75]
    """
    left, top, right, bottom = boxes.unbind(-1)
    return torch.stack([1 - right, top, 1 - left, bottom], dim=-1)


def flip(images: Tensor, boxes: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
    """Flip images (n, 3, S, S) and their boxes (n, 4) from left to right where `which` (n,) says so."""
    return (
        torch.where(which[:, None, None, None], images.flip(3), images),
        torch.where(which[:, None], flip_boxes(boxes), boxes),
    )


def overlap(first: Tensor, second: Tensor) -> Tensor:
    """Intersection over union of boxes (n, 4), (n,); 0 where one of them is inside out.

    Examples
    --------
    >>> overlap(torch.tensor([[0.0, 0.0, 1.0, 1.0]]), torch.tensor([[0.5, 0.0, 1.5, 1.0]])).item()
    0.3333333432674408
    """
    inner = torch.minimum(first[:, 2:], second[:, 2:]) - torch.maximum(first[:, :2], second[:, :2])
    shared = inner.clamp(min=0).prod(1)
    areas = [(box[:, 2:] - box[:, :2]).clamp(min=0).prod(1) for box in (first, second)]
    return torch.where(shared > 0, shared / (areas[0] + areas[1] - shared), torch.zeros_like(shared))


def drawn_boxes(rows: int = 200, *, size: int = 32, seed: int = 0) -> BoxImages:
    """Rectangles on noise, reddish ones (cats) and bluish ones (dogs), to try things on without any download."""
    rng = np.random.default_rng(seed)
    images = rng.integers(90, 150, size=(rows, 3, size, size), dtype=np.uint8)
    classes = rng.integers(0, 2, size=rows)
    sides = rng.integers(size // 5, size // 2, size=(rows, 2))
    corner = rng.integers(0, size - sides + 1)
    for i in range(rows):
        (x, y), (w, h) = corner[i], sides[i]
        images[i, 2 * classes[i], y : y + h, x : x + w] = 230
        images[i, 2 - 2 * classes[i], y : y + h, x : x + w] = 20
    # People do not draw their boxes to the pixel, so neither is every box here.
    edges = np.concatenate([corner, corner + sides], axis=1) + rng.normal(scale=0.5, size=(rows, 4))
    return BoxImages(
        torch.from_numpy(images),
        torch.from_numpy(np.clip(edges / size, 0, 1).astype(np.float32)),
        torch.from_numpy(classes.astype(np.int64)),
        [f"drawing {i}" for i in range(rows)],
    )
