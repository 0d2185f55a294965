"""The boxes experiment: regions for the corners of boxes around the faces of cats and dogs (paper, section 5.2).

Second of two stages, for any machine: intervals from what `experiments.box_networks` trained. All methods see the last
layer alone, a linear model on what goes into the box head.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fullcp.curvature import jacobian_for
from fullcp.data import BoxImages, overlap
from fullcp.evaluation import joint_coverage, validity_band, volume
from fullcp.experiments.box_networks import (
    Plan,
    Split,
    Trained,
    check_trained,
    load_trained,
    split_of,
    train_seeds,
    training_facts,
)
from fullcp.experiments.provenance import commit, device_name
from fullcp.experiments.summary import Mean, seeds_in_words
from fullcp.features import FeatureRows
from fullcp.predictors import (
    ConformalizedQuantileRegressor,
    FullConformalRegressor,
    InformedSplitConformalRegressor,
    JackknifePlusRegressor,
    LaplaceRegressor,
    NormalizedSplitConformalRegressor,
    Predictor,
    RefinedSplitConformalRegressor,
    ResidualConformalRegressor,
    SplitConformalRegressor,
)
from fullcp.regions import bonferroni
from fullcp.tuning import Tuning, tune

LEVELS = (0.85, 0.9, 0.95)
BETA = 0.01  # of CRF, as a share of the image's sides
_MEMORY = 4 * 10**9
_EPOCHS, _RATES = 100, (5e-3, 1e-5)  # of CRF and CQR heads
_CORNERS = 4
ALL = "all"  # the table of methods that keep no row back: they stand in every one


@dataclass(frozen=True)
class BoxRow:
    """One method at one level on the test rows of one seed.

    Attributes
    ----------
    table : "bbox" (a quarter calibrates), "bbox_50" or the like; "all" where no row is kept back.
    joint : "bonferroni", "max" or "ellipsoid".
    volume : mean volume of the regions, with corners in units of their standard deviation over the training rows.
    volume_in_image : the same with corners as shares of the image's sides.
    share : of training rows that calibrate; 0 for methods that keep none back.
    rows : how many rows calibrate; all training rows for methods that keep none back.
    localization_error : share of boxes that overlap the true one by less than half of their union.
    accuracy : share of cats and dogs told apart.
    device, commit : of the evaluation.
    """

    table: str
    seed: int
    method: str
    joint: str
    level: float
    volume: float
    volume_in_image: float
    coverage: float
    infinite_share: float
    share: float
    rows: int
    test_rows: int
    localization_error: float
    mean_overlap: float
    accuracy: float
    train_seconds: float
    seconds: float
    device: str
    commit: str

    def as_dict(self) -> dict[str, Any]:
        """The row as a dictionary."""
        return asdict(self)


@dataclass(frozen=True)
class Region:
    """Regions of the test rows, in the units of the network.

    Attributes
    ----------
    intervals : Tensor (m, 2, L, 4), rectangles, or what encloses the ellipsoids.
    volumes, coverage : (m, L) and (L,) where the regions are no rectangles.
    """

    method: str
    joint: str
    rows: int
    intervals: Tensor
    volumes: Tensor | None = None
    coverage: Tensor | None = None


@dataclass(frozen=True)
class Part:
    """The rows of one network: what goes into its head, and standardised boxes."""

    head: nn.Linear
    fit: tuple[Tensor, Tensor]
    cal: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    seed: int
    beta: float  # of CRF, in the network's units


def run(
    data: BoxImages,
    backbone: Callable[[], nn.Module],
    folder: Path,
    *,
    plan: Plan | None = None,
    seeds: Sequence[int] = range(20),
    levels: Sequence[float] = LEVELS,
    device: torch.device | str | None = None,
) -> Iterator[BoxRow]:
    """Train what the folder lacks, evaluate what was not evaluated yet, and yield the rows of all seeds.

    Parameters
    ----------
    data : see `fullcp.data.load_pets`.
    backbone : makes a backbone with its first weights, such as `lambda: load_vgg19(path)`.
    folder : where networks and results are kept; an interrupted run goes on from there.
    plan : how networks are trained; None is the paper's way.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    plan = plan or Plan()
    for seed in train_seeds(data, backbone, plan, seeds, folder, device=device):
        yield from evaluate_seed(data, folder, seed, plan=plan, levels=levels, device=device)


def evaluate_seed(
    data: BoxImages,
    folder: Path,
    seed: int,
    *,
    plan: Plan | None = None,
    levels: Sequence[float] = LEVELS,
    device: torch.device | str = "cpu",
) -> list[BoxRow]:
    """The rows of one trained seed, from the folder where it was evaluated before.

    Parameters
    ----------
    data : the images it was trained on; others are refused. Pixels are not needed (`BoxImages.without_pixels`).
    plan : which the seed must be trained by; None takes it as it is.
    """
    facts = check_trained(folder, seed, data, plan)
    kept = evaluated(folder, seed, levels)
    if kept:
        return kept
    plan, trained = load_trained(folder, seed, device)
    where = {"device": device_name(torch.device(device)), "commit": commit()}
    rows: list[BoxRow] = []
    for table, share, part, network, regions in regions_of(data, plan, trained, seed, levels):
        split = split_of(len(data), seed, share, plan.test_share)
        train = torch.cat([split.fit, split.cal])
        units = data.boxes[train].double().std(0, correction=0)
        about = {**_about(data, split.test, part, network), "share": share, **where}
        for region, seconds in regions:
            rows += _rows_of(region, table, seed, levels, part, network.scale.cpu().double(), units, about, seconds)
    path = _path(folder, seed)
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps({**_made_of(facts), "rows": [row.as_dict() for row in rows]}))
    temporary.replace(path)
    return rows


def evaluated(folder: Path, seed: int, levels: Sequence[float]) -> list[BoxRow]:
    """The rows that `evaluate_seed` wrote for these levels and the seed's networks as they are; none where it did not.

    Rows of networks that are no longer there (trained anew since) do not count.
    """
    path = _path(folder, seed)
    held = json.loads(path.read_text()) if path.is_file() else None
    if not isinstance(held, dict) or {**held, "rows": None} != {**_made_of(training_facts(folder, seed)), "rows": None}:
        return []
    kept = [BoxRow(**row) for row in held["rows"]]
    return kept if {row.level for row in kept} == set(levels) else []


def _made_of(facts: dict[str, Any]) -> dict[str, Any]:
    """What of the facts of training decides the rows, and which training it was."""
    return {key: facts[key] for key in ("plan", "images", "seconds")}


def _path(folder: Path, seed: int) -> Path:
    return folder / f"seed_{seed:03d}.json"


def summarise(rows: Sequence[BoxRow]) -> list[dict[str, Any]]:
    """Means over seeds with standard errors, a row for each table, method, kind of region and level.

    `valid` is the paper's mark: mean coverage within the band of split conformal prediction.
    """
    tables = list(dict.fromkeys(row.table for row in rows if row.table != ALL))
    groups: dict[tuple[str, str, str, float], list[BoxRow]] = {}
    for row in rows:
        for table in tables if row.table == ALL else [row.table]:
            groups.setdefault((table, row.method, row.joint, row.level), []).append(row)
    found = []
    for (table, method, joint, level), group in groups.items():
        low, high = validity_band(group[0].rows, level)
        means = {}
        names = ("volume", "coverage", "volume_in_image", "localization_error", "mean_overlap", "accuracy")
        for name in names:
            mean = Mean.of([getattr(row, name) for row in group], [row.seed for row in group])
            means[name], means[f"{name}_se"] = mean.value, mean.error
        found.append(
            {
                "table": table,
                "method": method,
                "joint": joint,
                "level": level,
                "seeds": len(group),
                "which_seeds": seeds_in_words([row.seed for row in group]),
                **means,
                "share": group[0].share,
                "rows": group[0].rows,
                "seconds": float(np.mean([row.seconds for row in group])),
                "device": " + ".join(dict.fromkeys(row.device for row in group)),
                "commit": " + ".join(dict.fromkeys(row.commit for row in group)),
                "infinite_share": float(np.mean([row.infinite_share for row in group])),
                "valid": bool(low <= means["coverage"] <= high),
                "band_low": low,
                "band_high": high,
            }
        )
    return found


def regions_of(
    data: BoxImages, plan: Plan, trained: dict[float, Trained], seed: int, levels: Sequence[float]
) -> Iterator[tuple[str, float, Part, Trained, Iterator[tuple[Region, float]]]]:
    """Every network of a seed with its regions; the methods that keep no row back stand in all tables."""
    for share, network in trained.items():
        split = split_of(len(data), seed, share, plan.test_share)
        part = _part(data, network, split, seed)
        if share:
            table = "bbox" if share == 0.25 else f"bbox_{100 * share:g}"
            yield table, share, part, network, _timed(_split_methods(part, levels))
        else:
            yield ALL, share, part, network, _timed(_full_methods(part, levels))


def _part(data: BoxImages, network: Trained, split: Split, seed: int) -> Part:
    y = (data.boxes.to(network.z.device).double() - network.center.double()) / network.scale.double()
    fit, cal, test = ((network.z[rows], y[rows]) for rows in (split.fit, split.cal, split.test))
    return Part(network.head(), fit, cal, test, seed, BETA / float(network.scale.mean()))


def _timed(regions: Iterator[Region]) -> Iterator[tuple[Region, float]]:
    start = time.perf_counter()
    for region in regions:
        yield region, time.perf_counter() - start
        start = time.perf_counter()


def scalar_tuning(head: nn.Linear, z: Tensor, y: Tensor) -> Tuning:
    """One l2 and the noise of the last layer by the marginal likelihood on rows z (N, p), y (N, 4)."""
    features = FeatureRows(jacobian_for("last_layer", head, z), z, memory=_MEMORY)
    return tune(features, y - features.predictions, structure="scalar", curvature="last_layer")


def _full_methods(part: Part, levels: Sequence[float]) -> Iterator[Region]:
    """Methods that keep no row back."""
    tuning = scalar_tuning(part.head, *part.fit)
    rows = len(part.fit[0])
    settings: dict[str, Any] = {"curvature": "last_layer", "l2": float(tuning.l2[0]), "memory": _MEMORY}
    yield from _both_ways("ACP-GN", FullConformalRegressor(part.head, **settings).conformalize(*part.fit), part, levels)
    jackknife = JackknifePlusRegressor(part.head, **settings).conformalize(*part.fit)
    yield from _both_ways("jackknife+", jackknife, part, levels)
    la = LaplaceRegressor(part.head, noise=tuning.noise, **settings).fit(*part.fit)
    z, y = part.test
    # The rectangle around an ellipsoid: where one coordinate alone reaches the radius.
    radius = {level: _chi(level) / _normal(level) for level in levels}
    f, intervals = la.predict_interval(z, list(levels))
    stretch = torch.tensor([radius[level] for level in levels], dtype=f.dtype, device=f.device)[None, None, :, None]
    around = f[:, None, None] + (intervals - f[:, None, None]) * stretch
    inside = la.ellipsoid_contains(z, y, list(levels)).double().mean(0)
    yield Region("LA", "ellipsoid", rows, around, la.ellipsoid_volume(z, list(levels)), inside)


def _split_methods(part: Part, levels: Sequence[float]) -> Iterator[Region]:
    """Methods that calibrate on rows the network has not seen."""
    head, inner = part.head, scalar_tuning(part.head, *part.fit)
    settings: dict[str, Any] = {"curvature": "last_layer", "memory": _MEMORY}
    own, outer = float(inner.l2[0]), float(scalar_tuning(head, *part.cal).l2[0])
    cal = part.cal
    yield from _both_ways("SCP", SplitConformalRegressor(head).conformalize(*cal), part, levels)
    crf = ResidualConformalRegressor(head, _learner(part, _CORNERS), part.beta, **_recipe(part))
    yield from _both_ways("CRF", crf.fit(*part.fit).conformalize(*cal), part, levels)
    yield _quantile_regions(part, levels)
    scp_gn = NormalizedSplitConformalRegressor(head, l2=own, **settings).fit(*part.fit).conformalize(*cal)
    yield from _both_ways("SCP-GN", scp_gn, part, levels)
    # The paper tunes l2 on the rows that calibrate, which costs the guarantee; its network's own keep it.
    for name, l2 in (("ACP-GN (split + refine)", outer), ("ACP-GN (split + refine, own l2)", own)):
        cp = RefinedSplitConformalRegressor(head, l2=l2, **settings).conformalize(*cal)
        yield from _both_ways(name, cp, part, levels)
    informed = InformedSplitConformalRegressor(head, l2=own, **settings).fit(*part.fit).conformalize(*cal)
    yield from _both_ways("informed", informed, part, levels)


def _both_ways(method: str, cp: Predictor, part: Part, levels: Sequence[float]) -> Iterator[Region]:
    for joint in ("bonferroni", "max"):
        yield Region(method, joint, cp.n_rows_, cp.predict_interval(part.test[0], list(levels), joint=joint).intervals)


def _quantile_regions(part: Part, levels: Sequence[float]) -> Region:
    """CQR: one corner at a time, each at Bonferroni's level, which its quantiles are trained for."""
    asked = [float(bonferroni(Fraction(str(level)), _CORNERS)) for level in levels]
    ends = []
    for o in range(_CORNERS):
        cqr = ConformalizedQuantileRegressor(_learner(part, 2 * len(asked)), confidence_level=asked, **_recipe(part))
        cqr.fit(part.fit[0], part.fit[1][:, o]).conformalize(part.cal[0], part.cal[1][:, o])
        ends.append(cqr.predict_interval(part.test[0], asked).intervals)
    return Region("CQR", "bonferroni", len(part.cal[0]), torch.stack(ends, dim=3))


class _Standardized(nn.Module):
    """z in units of its deviations, with |z|^2 of about 1, for heads that are trained by themselves.

    Weights of unit prior variance then give outputs of unit variance, however many inputs there are. With plain units
    a head with more inputs than rows overfits: regions of CRF had seven times the volume (frozen VGG-19, 4,096 inputs).
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, z: Tensor):
        super().__init__()
        scale = z.std(0, correction=0)
        self.register_buffer("mean", z.mean(0))
        used = torch.where(scale > 1e-6 * scale.max(), scale, torch.ones_like(scale))
        self.register_buffer("scale", used * z.shape[1] ** 0.5)

    def forward(self, z: Tensor) -> Tensor:
        return (z - self.mean) / self.scale


def _learner(part: Part, count: int) -> nn.Module:
    """A linear head with `count` outputs on what goes into the box head."""
    z = part.fit[0]
    linear = nn.Linear(z.shape[1], count, device=z.device)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return nn.Sequential(_Standardized(z), linear)


def _recipe(part: Part) -> dict[str, Any]:
    return {"epochs": _EPOCHS, "batch_size": 128, "learning_rate": _RATES, "seed": part.seed}


def predictions(part: Part) -> Tensor:
    """The boxes of the test rows (m, 4), in the network's units."""
    with torch.no_grad():
        return part.head(part.test[0])


def _about(data: BoxImages, test: Tensor, part: Part, network: Trained) -> dict[str, float]:
    """How well the network itself does on the test rows."""
    boxes = (predictions(part) * network.scale + network.center).cpu()
    found = overlap(boxes, data.boxes[test])
    dogs = (network.logits.cpu()[test] > 0).long()
    return {
        "localization_error": float((found < 0.5).double().mean()),
        "mean_overlap": float(found.mean()),
        "accuracy": float((dogs == data.classes[test]).double().mean()),
        "train_seconds": network.seconds,
    }


def _rows_of(
    region: Region,
    table: str,
    seed: int,
    levels: Sequence[float],
    part: Part,
    scale: Tensor,
    units: Tensor,
    about: dict[str, Any],
    seconds: float,
) -> Iterator[BoxRow]:
    """A row a level; `scale` is the network's unit of a corner, `units` the one that volumes are told in."""
    in_image = float(scale.prod())
    for j, level in enumerate(levels):
        ends = region.intervals[:, :, j].cpu()
        volumes = volume(ends) if region.volumes is None else region.volumes[:, j].cpu().numpy()
        coverage = joint_coverage(part.test[1], ends) if region.coverage is None else float(region.coverage[j])
        yield BoxRow(
            table=table,
            seed=seed,
            method=region.method,
            joint=region.joint,
            level=float(level),
            volume=float(volumes.mean()) * in_image / float(units.prod()),
            volume_in_image=float(volumes.mean()) * in_image,
            coverage=coverage,
            infinite_share=float((~np.isfinite(volumes)).mean()),
            rows=region.rows,
            test_rows=len(ends),
            seconds=seconds,
            **about,
        )


def _chi(level: float) -> float:
    from fullcp.predictors.laplace import chi_square_quantiles

    return float(chi_square_quantiles([Fraction(str(level))], _CORNERS)[0]) ** 0.5


def _normal(level: float) -> float:
    return float(-torch.special.ndtri(torch.tensor((1 - level) / 2, dtype=torch.float64)))
