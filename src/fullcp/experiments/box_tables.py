"""The paper's tables of boxes by `fullcp reproduce`: photographs read, networks trained, rows as of all tables."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullcp.data import BoxImages, DataUnavailableError, load_packed, load_pets
from fullcp.experiments.box_networks import Plan, train_seeds, trained_seeds, training_facts
from fullcp.experiments.boxes import LEVELS, evaluate_seed, evaluated, summarise
from fullcp.experiments.summary import seeds_in_words
from fullcp.vision import Recipe, balance, load_vgg19, normalized

TABLES = ("bbox", "bbox_50")
FROZEN = tuple(f"{name}_frozen" for name in TABLES)  # what they are called with the backbone as it is
SEEDS, EPOCHS = 20, 200
_METHODS_WITH_SCORES = ("ACP-GN", "informed")  # the first words of their names
Say = Callable[[str], None]


@dataclass(frozen=True)
class Photographs:
    """Where images and weights are, and what is trained on them.

    Attributes
    ----------
    images : folder of the Oxford-IIIT Pet data, or a packed file; None looks in FULLCP_DATA.
    weights : of VGG-19; None looks in FULLCP_DATA.
    """

    images: Path | None = None
    weights: Path | None = None
    frozen: bool = False
    trunk: int = 4096
    learning_rate: float = 1e-2

    @property
    def variant(self) -> str:
        """What is added to the names of tables and folders."""
        return "_frozen" if self.frozen else ""

    def plan(self, epochs: int) -> Plan:
        """How networks are trained."""
        recipe = Recipe(epochs=epochs, learning_rate=self.learning_rate)
        return Plan(frozen=self.frozen, recipe=recipe, trunk=(self.trunk, self.trunk))


def read_images(images: Path | None) -> BoxImages:
    """Photographs and their boxes, from a folder or a packed file."""
    return load_packed(images) if images is not None and images.is_file() else load_pets(images)


def read_backbone(weights: Path | None) -> nn.Module:
    """VGG-19 as its file has it."""
    return load_vgg19(_weights() if weights is None else weights)


def balanced(backbone: nn.Module, data: BoxImages, device: torch.device | str) -> Callable[[], nn.Module]:
    """Hands out the backbone, on a device, with convolutions of one size; see `fullcp.vision.balance`."""
    made = balance(backbone.to(device), normalized(data.images[:16].to(device)))  # type: ignore[arg-type]
    return lambda: made


class BoxTables:
    """Trains and evaluates what is missing.

    Parameters
    ----------
    folder : of the run; networks and evaluations are kept in ``<folder>/boxes``.
    """

    def __init__(self, asked: Photographs, folder: Path, device: torch.device, say: Say, *, seeds: int, epochs: int):
        self.asked, self.device, self.say, self.seeds = asked, device, say, seeds
        self.folder = folder / f"boxes{asked.variant}"
        self.plan = asked.plan(epochs)
        self._images: BoxImages | None = None

    def train(self) -> None:
        """Networks of all seeds, three each."""
        backbone = read_backbone(self.asked.weights)  # before images are read, which takes longer
        for seed in train_seeds(
            self._data(),
            balanced(backbone, self._data(), self.device),
            self.plan,
            range(self.seeds),
            self.folder,
            device=self.device,
        ):
            self.say(f"boxes: seed {seed} is trained")

    def evaluate(self) -> None:
        """Every method on every seed that is trained; those of another plan or of other images are refused."""
        trained = self._trained()
        if not trained:
            raise FileNotFoundError(f"{self.folder} holds no trained seed: run the training stage first")
        for seed in trained:
            evaluate_seed(self._data(), self.folder, seed, plan=self.plan, device=self.device)
            self.say(f"boxes: seed {seed} is evaluated")
        missing = [seed for seed in range(self.seeds) if seed not in trained]
        if missing:
            self.say(f"boxes: seeds {seeds_in_words(missing)} are not trained, and are left out")

    def rows(self, table: str) -> Iterator[dict[str, Any]]:
        """The rows of one table over all seeds that are evaluated, volumes in hundredths as the paper's."""
        found = [row for seed in self._trained() for row in evaluated(self.folder, seed, LEVELS)]
        if found:
            plan, last = self._plan(), max(row.seed for row in found)
            yield from (self._row(row, plan, last) for row in summarise(found) if row["table"] == table)

    def training(self) -> Iterator[dict[str, Any]]:
        """What training cost, a row for each machine and commit."""
        plan = self._plan()
        groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for facts in (training_facts(self.folder, seed) for seed in self._trained()):
            groups.setdefault((facts["device"], facts["commit"]), []).append(facts)
        for (device, commit), group in groups.items():
            yield {
                "dataset": f"boxes{self.asked.variant}",
                "stage": "frozen" if plan.frozen else "fine-tuned",
                "networks": len(group) * len(plan.parts),
                "epochs": plan.recipe.epochs,
                "roles": " ".join(f"fit-{100 * share:g}" if share else "full" for share in plan.parts),
                "seconds": round(sum(sum(facts["seconds"]) for facts in group), 2),
                "device": device,
                "commit": commit,
            }

    def _plan(self) -> Plan:
        """What the seeds were trained by, whatever the command line says now; one plan for all."""
        seeds = self._trained()
        plans = [training_facts(self.folder, seed)["plan"] for seed in seeds]
        other = [seed for seed, plan in zip(seeds, plans, strict=True) if plan != plans[0]]
        if other:
            raise ValueError(
                f"{self.folder} holds seeds that were trained in different ways: seeds {seeds_in_words(other)} unlike "
                f"seed {seeds[0]}; put them into folders of their own"
            )
        return Plan.of(plans[0]) if plans else self.plan

    def _row(self, row: dict[str, Any], plan: Plan, last: int) -> dict[str, Any]:
        method = row["method"]
        options = " --frozen" if plan.frozen else ""
        options += "" if plan.recipe.epochs == EPOCHS else f" --epochs {plan.recipe.epochs}"
        return {
            "table": row["table"] + self.asked.variant,
            "dataset": "",
            "n": "",
            "inputs": "",
            "method": f"{method}, max" if row["joint"] == "max" else method,
            "curvature": "",
            "conformity": "studentized" if method.startswith(_METHODS_WITH_SCORES) else "",
            "calibration": f"{100 * row['share']:g}",
            "level": f"{100 * row['level']:g}",
            "size": f"{100 * row['volume']:.6g}",
            "size_se": _error(100 * row["volume_se"]),
            "coverage": f"{100 * row['coverage']:.3f}",
            "coverage_se": _error(100 * row["coverage_se"]),
            "valid": "yes" if row["valid"] else "no",
            "infinite": f"{row['infinite_share']:.4g}",
            "score": "",
            "rows": row["rows"],
            "repeats": row["seeds"],
            "folds": row["seeds"],
            "seeds": row["which_seeds"],
            "seconds": f"{row['seconds']:.4g}",
            "seconds_se": "",
            "device": row["device"],
            "commit": row["commit"],
            "command": f"fullcp reproduce --table {row['table']}{options} --seeds {last + 1}",
        }

    def _data(self) -> BoxImages:
        if self._images is None:
            self._images = read_images(self.asked.images)
        return self._images

    def _trained(self) -> list[int]:
        return trained_seeds(self.folder, range(self.seeds))


def _weights() -> Path:
    """The weights of VGG-19 in the folder that FULLCP_DATA names."""
    given = os.environ.get("FULLCP_DATA")
    found = (
        sorted(Path(given).glob("**/vgg19*.safetensors")) + sorted(Path(given).glob("**/vgg19*.pth")) if given else []
    )
    if not found:
        raise DataUnavailableError(
            f"weights of VGG-19 are missing: name their file (--weights), or put vgg19*.safetensors or torchvision's "
            f"vgg19*.pth into the folder that FULLCP_DATA names{f', which is {given}' if given else ''}"
        )
    return found[0]


def _error(value: float) -> str:
    return "" if value != value else f"{value:.3g}"
