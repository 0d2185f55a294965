"""What pictures of boxes need of one seed, computed where the networks are and drawn anywhere."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fullcp.data import BoxImages, overlap
from fullcp.experiments.box_networks import load_trained, split_of
from fullcp.experiments.boxes import predictions, regions_of
from fullcp.files import read_file, write_file


@dataclass(frozen=True)
class View:
    """The test rows of one seed at one level; boxes are shares of the image's sides.

    Attributes
    ----------
    rows : Tensor (m,), the test rows.
    truth : Tensor (m, 4)
    boxes : predictions (m, 4), by method.
    regions : rectangles (m, 2, 4), by method: those of Bonferroni, for ellipsoids the one around.
    """

    seed: int
    level: float
    rows: Tensor
    truth: Tensor
    boxes: dict[str, Tensor]
    regions: dict[str, Tensor]

    def overlaps(self, method: str) -> Tensor:
        """Intersection over union of predicted and true boxes, (m,)."""
        return overlap(self.boxes[method], self.truth)

    def best_typical_worst(self, method: str, count: int) -> list[list[int]]:
        """Test rows of the largest, the middle and the smallest overlaps, `count` of each."""
        order = self.overlaps(method).argsort(descending=True, stable=True).tolist()
        middle = max(0, (len(order) - count) // 2)
        return [order[:count], order[middle : middle + count], order[-count:]]

    def save(self, path: Path) -> None:
        """Write to one file."""
        names = list(self.regions)
        tensors = {"rows": self.rows, "truth": self.truth}
        for i, name in enumerate(names):
            tensors.update({f"boxes.{i}": self.boxes[name].float(), f"regions.{i}": self.regions[name].float()})
        write_file(path, tensors, {"kind": "boxes", "methods": names, "seed": self.seed, "level": self.level})

    @classmethod
    def load(cls, path: Path) -> View:
        """Read what `save` wrote."""
        header, state = read_file(path, torch.device("cpu"))
        if header.get("kind") != "boxes":
            raise ValueError(f"path holds no boxes to draw: {path}")
        boxes, regions = (
            {name: state[f"{what}.{i}"] for i, name in enumerate(header["methods"])} for what in ("boxes", "regions")
        )
        return cls(header["seed"], header["level"], state["rows"], state["truth"], boxes, regions)


def view_seed(
    data: BoxImages,
    folder: Path,
    seed: int,
    *,
    level: float = 0.9,
    share: float | None = None,
    device: torch.device | str = "cpu",
) -> View:
    """Boxes and regions of one trained seed.

    Parameters
    ----------
    share : of training rows that calibrate; None is the first of those trained for.
    """
    plan, trained = load_trained(folder, seed, device)
    share = plan.shares[0] if share is None else share
    if share not in plan.shares:
        raise ValueError(f"share must be one of {', '.join(map(str, plan.shares))}, got {share}")
    boxes: dict[str, Tensor] = {}
    found: dict[str, Tensor] = {}
    for _, part_share, part, network, regions in regions_of(data, plan, trained, seed, [level]):
        if part_share not in (0.0, share):
            continue
        center, scale = network.center.cpu(), network.scale.cpu()
        for region, _ in regions:
            if region.joint != "max":
                boxes[region.method] = predictions(part).cpu() * scale + center
                found[region.method] = region.intervals[:, :, 0].cpu().float() * scale + center
    rows = split_of(len(data), seed, share, plan.test_share).test
    return View(seed, level, rows, data.boxes[rows], boxes, found)
