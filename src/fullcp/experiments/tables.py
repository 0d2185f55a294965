"""The paper's tables, and its figure of calibration shares: which data sets, which methods, which variants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fullcp.experiments.protocol import SHARES
from fullcp.experiments.uci_methods import Arm

_MAIN = ("yacht", "boston", "energy", "bike", "protein", "facebook_2")
_EXTRA = ("concrete", "wine", "kin8nm", "power", "community", "facebook_1")
_LARGE = ("bike", "community", "protein", "facebook_1", "facebook_2")
_ACP = ("energy", "concrete", "wine", "kin8nm", "power", "community", "bike")


@dataclass(frozen=True)
class TableSpec:
    """A table of the paper.

    Attributes
    ----------
    arms : its rows, for each data set; those of this library's own methods come last.
    """

    name: str
    title: str
    datasets: tuple[str, ...]
    arms: tuple[Arm, ...]

    def chosen(self, methods: Sequence[str] | None = None) -> list[Arm]:
        """The rows of the methods asked for; None is all."""
        return [arm for arm in self.arms if methods is None or arm.method in methods]


def _all_methods(share: int) -> tuple[Arm, ...]:
    return (
        Arm("LA"),
        Arm("SCP", share=share),
        Arm("CRF", share=share),
        Arm("CQR", share=share),
        Arm("ACP-GN", score="studentized"),
        Arm("SCP-GN", share=share),
        Arm("ACP-GN (split + refine)", score="studentized", share=share),
        *_ours(),
    )


def arms_of_share(share: int) -> tuple[Arm, ...]:
    """All methods, and of those that keep rows back the ones that keep back so many per cent."""
    return tuple(arm for arm in _all_methods(share) if arm.share in (0, share))


def _ours(*curvatures: str) -> tuple[Arm, ...]:
    """The library's own methods, in every table, with the full matrix and these curvatures."""
    found: list[Arm] = []
    for curvature in ("full", *curvatures):
        found += [Arm("informed", curvature, "studentized", share) for share in SHARES]
        found += [Arm("jackknife+", curvature)]
    return tuple(found)


def _curvatures(other: str, score: str) -> tuple[Arm, ...]:
    both = ("full", other)
    return (
        *(Arm("LA", c) for c in both),
        Arm("SCP", share=50),
        *(Arm("SCP-GN", c, share=50) for c in both),
        *(Arm("ACP-GN", c, score) for c in both),
        *(Arm("ACP-GN (split + refine)", c, score, 50) for c in both),
        *_ours(other),
    )


_SPECS = (
    TableSpec("main", "UCI, half of the training part calibrates", _MAIN, _all_methods(50)),
    TableSpec("extra", "More UCI sets, half of the training part calibrates", _EXTRA, _all_methods(50)),
    TableSpec("main_25", "UCI, a quarter of the training part calibrates", _MAIN, _all_methods(25)),
    TableSpec("extra_25", "More UCI sets, a quarter of the training part calibrates", _EXTRA, _all_methods(25)),
    TableSpec(
        "extra_acp",
        "ACP, 200 candidate labels",
        _ACP,
        (
            Arm("ACP", score="standard"),
            Arm("ACP-GN", score="studentized"),
            Arm("ACP-GN (split + refine)", score="studentized", share=50),
            *_ours(),
        ),
    ),
    TableSpec("uci_kfac", "KFAC in place of the full Gauss-Newton matrix", _LARGE, _curvatures("kfac", "standard")),
    TableSpec(
        "uci_lastlayer", "The last layer in place of all parameters", _LARGE, _curvatures("last_layer", "studentized")
    ),
)

TABLES = {spec.name: spec for spec in _SPECS}

CALIBRATION_SHARES = (10, 25, 50, 75, 90)
SHARE_FIGURE = TableSpec(
    "calibration_share",
    "Split + refine against the share of the training part that calibrates",
    ("protein",),
    (
        Arm("ACP-GN", score="studentized"),
        *(Arm("ACP-GN (split + refine)", score="studentized", share=share) for share in CALIBRATION_SHARES),
        *(Arm("informed", score="studentized", share=share) for share in SHARES),
    ),
)

SPECS = {**TABLES, SHARE_FIGURE.name: SHARE_FIGURE}
