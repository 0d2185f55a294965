"""The networks of the boxes experiment, seed by seed: detectors trained, and what their last layer sees kept in files.

The first of two stages, and the only one that wants a GPU. A seed's file holds, for each share of rows kept back for
calibration, the box head and what goes into it for all images; `experiments.boxes` makes intervals of that.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fullcp.data import BoxImages, Standardizer, halves, random_splits
from fullcp.experiments.provenance import commit, device_name
from fullcp.files import read_file, read_header, write_file
from fullcp.predictors.fingerprint import Fingerprint
from fullcp.vision import Detector, Recipe, apply_heads, finetune, outputs, pooled_features, seeded, train_heads

_CACHE = "features.safetensors"


@dataclass(frozen=True)
class Plan:
    """What is trained. A folder holds the seeds of one plan.

    Attributes
    ----------
    frozen : whether the backbone stays as it is; else it is trained with the heads.
    trunk, dropout, pool : see `fullcp.vision.Detector`.
    shares : of the training rows, which go to calibration; one network each, and one that is trained on all.
    test_share : of all rows.
    """

    frozen: bool = False
    recipe: Recipe = field(default_factory=Recipe)
    trunk: tuple[int, ...] = (4096, 4096)
    dropout: float = 0.5
    pool: int = 7
    shares: tuple[float, ...] = (0.25, 0.5)
    test_share: float = 0.2

    def __post_init__(self) -> None:
        if not self.shares or not all(0 < share < 1 for share in self.shares):
            raise ValueError(f"shares must lie between 0 and 1, got {self.shares!r}")

    @property
    def parts(self) -> tuple[float, ...]:
        """The shares kept back, one network each; 0 is the network that is trained on all training rows."""
        return (0.0, *self.shares)

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        return json.loads(json.dumps(asdict(self)))

    @classmethod
    def of(cls, facts: dict[str, Any]) -> Plan:
        """The plan of these facts."""
        read: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in facts.items()}
        return cls(**{**read, "recipe": Recipe(**read["recipe"])})


@dataclass(frozen=True)
class Split:
    """Rows of one seed and one share: to fit the network, to calibrate, to test."""

    fit: Tensor
    cal: Tensor
    test: Tensor


@dataclass(frozen=True)
class Trained:
    """A trained network as far as intervals need it, in units in which the boxes of its rows are standardised.

    Attributes
    ----------
    z : Tensor (n, p), what goes into the heads for every image.
    weight, bias : Tensor (4, p), (4,), the box head.
    logits : Tensor (n,), of a dog.
    center, scale : Tensor (4,), of the boxes that trained it.
    seconds : what training took; networks that train together share it.
    """

    z: Tensor
    weight: Tensor
    bias: Tensor
    logits: Tensor
    center: Tensor
    scale: Tensor
    seconds: float

    def head(self) -> nn.Linear:
        """The box head, z -> boxes in standardised units."""
        head = nn.Linear(self.weight.shape[1], 4, device=self.weight.device)
        with torch.no_grad():
            head.weight.copy_(self.weight)
            head.bias.copy_(self.bias)
        return head


def split_of(rows: int, seed: int, share: float, test_share: float = 0.2) -> Split:
    """The rows of one seed; all shares have the same test rows."""
    train, test = next(islice(random_splits(rows, seed + 1, test_share=test_share), seed, None))
    fit, cal = halves(train, share=share) if share else (train, train[:0])
    return Split(*(torch.from_numpy(np.asarray(part)) for part in (fit, cal, test)))


def train_seeds(
    data: BoxImages,
    backbone: Callable[[], nn.Module],
    plan: Plan,
    seeds: Sequence[int],
    folder: Path,
    *,
    device: torch.device | str | None = None,
    at_once: int = 20,
) -> Iterator[int]:
    """Train the networks of each seed that the folder does not hold yet, and yield the seeds as their files are there.

    Parameters
    ----------
    backbone : makes a backbone with its first weights, or hands out one and the same: copies of it are trained.
    at_once : with a frozen backbone, how many seeds train together.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    folder.mkdir(parents=True, exist_ok=True)
    missing = [seed for seed in seeds if not _is_there(folder, seed, plan, data)]
    yield from (seed for seed in seeds if seed not in missing)
    if not missing:
        return
    images = None if plan.frozen else data.images.to(device)
    boxes, classes = data.boxes.to(device), data.classes.to(device)
    if images is not None:
        for seed in missing:
            _save(folder, seed, plan, data, _finetuned(plan, backbone, images, boxes, classes, seed), device)
            yield seed
        return
    features, flipped = _features(plan, backbone, data, folder, device)
    for start in range(0, len(missing), at_once):
        group = missing[start : start + at_once]
        made: dict[int, dict[float, Trained]] = {seed: {} for seed in group}
        for share in plan.parts:
            for seed, trained in _frozen(plan, features, flipped, boxes, classes, group, share).items():
                made[seed][share] = trained
        for seed in group:
            _save(folder, seed, plan, data, made[seed], device)
            yield seed


def load_trained(folder: Path, seed: int, device: torch.device | str = "cpu") -> tuple[Plan, dict[float, Trained]]:
    """What `train_seeds` wrote of one seed."""
    header, state = read_file(_trained_path(folder, seed), torch.device(device))
    plan = Plan.of(header["plan"])
    trained = {}
    for i, share in enumerate(plan.parts):
        tensors = {name.split(".")[1]: value for name, value in state.items() if name.startswith(f"{i}.")}
        trained[share] = Trained(**tensors, seconds=header["seconds"][i])
    return plan, trained


def _path(folder: Path, seed: int) -> Path:
    return folder / f"seed_{seed:03d}.safetensors"


def _trained_path(folder: Path, seed: int) -> Path:
    """The file of a seed, which must be there."""
    path = _path(folder, seed)
    if not path.is_file():
        raise FileNotFoundError(f"seed {seed} is not trained: {path} does not exist; run the training stage first")
    return path


def _is_there(folder: Path, seed: int, plan: Plan, data: BoxImages) -> bool:
    """Whether a file holds the seed; one of another plan or of other images is refused, not trained over."""
    return _path(folder, seed).is_file() and bool(check_trained(folder, seed, data, plan))


def check_trained(folder: Path, seed: int, data: BoxImages, plan: Plan | None = None) -> dict[str, Any]:
    """The facts of a seed's file, which must be of these images, and of this plan unless that is None."""
    facts = training_facts(folder, seed)
    has, wanted = _flat(facts["plan"]), _flat(facts["plan"] if plan is None else plan.facts())
    differing = [f"{key}={value!r}" for key, value in has.items() if wanted[key] != value]
    if facts["images"] != data.digest():
        differing.append("other images")
    if differing:
        raise ValueError(
            f"folder holds seed {seed} trained with {', '.join(differing)}; name another folder, or ask for the same: "
            f"{_path(folder, seed)}"
        )
    return facts


def trained_seeds(folder: Path, seeds: Sequence[int]) -> list[int]:
    """Those of the seeds that the folder holds."""
    return [seed for seed in seeds if _path(folder, seed).is_file()]


def training_facts(folder: Path, seed: int) -> dict[str, Any]:
    """What a seed's file says of its training: plan, digest of the images, seconds a share, device, commit."""
    return read_header(_trained_path(folder, seed))


def _flat(plan: dict[str, Any]) -> dict[str, Any]:
    """The facts of a plan with those of its recipe among them."""
    return {**{key: value for key, value in plan.items() if key != "recipe"}, **plan["recipe"]}


def _save(
    folder: Path, seed: int, plan: Plan, data: BoxImages, parts: dict[float, Trained], device: torch.device
) -> None:
    tensors, names = {}, ("z", "weight", "bias", "logits", "center", "scale")
    for i, share in enumerate(plan.parts):
        tensors.update({f"{i}.{name}": getattr(parts[share], name).cpu() for name in names})
    facts = {
        "plan": plan.facts(),
        "images": data.digest(),
        "seconds": [parts[share].seconds for share in plan.parts],
        "seed": seed,
        "device": device_name(device),
        "commit": commit(),
    }
    write_file(_path(folder, seed), tensors, facts)


def _units(boxes: Tensor) -> tuple[Tensor, Tensor]:
    """Center and scale (4,) that standardise boxes (N, 4)."""
    found = Standardizer.of(boxes.cpu().numpy())
    return tuple(torch.from_numpy(v).to(boxes) for v in (found.mean, found.scale))  # type: ignore[return-value]


def _finetuned(
    plan: Plan, backbone: Callable[[], nn.Module], images: Tensor, boxes: Tensor, classes: Tensor, seed: int
) -> dict[float, Trained]:
    """One seed: the networks of all shares, backbone and heads trained."""
    made = {}
    for share in plan.parts:
        start = time.perf_counter()
        rows = split_of(len(images), seed, share, plan.test_share).fit.to(images.device)
        center, scale = _units(boxes[rows])
        with seeded(seed, images.device):
            detector = _detector(plan, backbone().to(images.device), images.shape[-1])
        finetune(
            detector,
            images,
            boxes,
            classes,
            rows,
            center=center,
            scale=scale,
            recipe=plan.recipe,
            seed=seed,
            name=f"seed {seed}, {share:.0%} kept back",
        )
        z, logits = outputs(detector, images)
        box = detector.heads.box
        weight, bias = box.weight.detach().float(), box.bias.detach().float()
        made[share] = Trained(z, weight, bias, logits, center, scale, time.perf_counter() - start)
    return made


def _frozen(
    plan: Plan,
    features: Tensor,
    flipped: Tensor | None,
    boxes: Tensor,
    classes: Tensor,
    seeds: Sequence[int],
    share: float,
) -> dict[int, Trained]:
    """One share: the heads of several seeds, trained together."""
    start = time.perf_counter()
    rows = torch.stack([split_of(len(boxes), seed, share, plan.test_share).fit for seed in seeds]).to(boxes.device)
    units = [_units(boxes[each]) for each in rows]
    members = train_heads(
        features,
        flipped,
        boxes,
        classes,
        rows,
        centers=torch.stack([center for center, _ in units]),
        scales=torch.stack([scale for _, scale in units]),
        seeds=seeds,
        recipe=plan.recipe,
        trunk=plan.trunk,
        drop=plan.dropout,
    )
    seconds = (time.perf_counter() - start) / len(seeds)
    made = {}
    for seed, member, (center, scale) in zip(seeds, members, units, strict=True):
        z, logits = apply_heads(member, features)
        weight, bias = member.box.weight.detach(), member.box.bias.detach()
        made[seed] = Trained(z, weight, bias, logits, center, scale, seconds)
    return made


def _detector(plan: Plan, backbone: nn.Module, size: int) -> Detector:
    return Detector(deepcopy(backbone), size, pool=plan.pool, trunk=plan.trunk, dropout=plan.dropout)


def _features(
    plan: Plan, backbone: Callable[[], nn.Module], data: BoxImages, folder: Path, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Features of all images and of all flipped ones, from the folder's cache where they are in it."""
    made = backbone().to(device)
    path = folder / _CACHE
    facts = {"images": data.digest(), "backbone": Fingerprint(made).digest(), "pool": plan.pool}
    if path.is_file():
        header, state = read_file(path, device)
        if all(header[key] == value for key, value in facts.items()) and ("flipped" in state or not plan.recipe.flips):
            return state["features"], state.get("flipped") if plan.recipe.flips else None
    detector = _detector(plan, made, data.images.shape[-1])
    images = data.images.to(device)
    found = {"features": pooled_features(detector, images)}
    if plan.recipe.flips:
        found["flipped"] = pooled_features(detector, images, flipped=True)
    write_file(path, found, facts)
    return found["features"], found.get("flipped")
