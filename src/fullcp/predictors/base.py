"""What all predictors share: parameters, reading data, batches, joint levels, saving."""

from __future__ import annotations

import inspect
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import Self

from fullcp.curvature import Curvature, look_at, points_within
from fullcp.features import Network
from fullcp.files import read_file, write_file
from fullcp.inputs import (
    ModelTraits,
    Rows,
    check_all_finite,
    check_choice,
    check_columns,
    check_outputs,
    check_row_shape,
    model_traits,
    read_inputs,
    read_label,
    read_levels,
    read_rows,
    read_single_level,
)
from fullcp.joint import JointScores, PrunedScores, read_scales
from fullcp.memory import DEFAULT_MEMORY, parse_memory
from fullcp.predictors.fingerprint import Fingerprint, alike
from fullcp.predictors.result import PredictionIntervals
from fullcp.predictors.settings import brief, is_plain, kept_setting
from fullcp.progress import track
from fullcp.regions import Interval, bonferroni, rows_needed
from fullcp.sources import Inputs

JOINT = ("bonferroni", "max")


class NotFittedError(ValueError, AttributeError):
    """A prediction was asked for before the data it rests on were given."""


class InfiniteIntervalWarning(UserWarning):
    """There are too few rows for a finite interval at the level asked for."""


@dataclass(frozen=True)
class Batch:
    """Some test points x (m, ...): predictions f (m, O) in float64 and, for methods that need them, phi (m, O, D).

    In place of phi stands x where the curvature asks for no more (see `fullcp.curvature.look_at`). `output` is what the
    network said, (m, K) in float64, before the method made predictions of it.
    """

    x: Tensor
    f: Tensor
    phi: Tensor | None
    output: Tensor


class Predictor(ABC):
    """Intervals around the predictions of a trained network.

    Subclasses store their arguments in `__init__` and check them when they are given data. What they learn is kept
    in attributes that end in an underscore.
    """

    model: nn.Module
    memory: str | int
    network_: Network
    n_rows_: int
    _trainable: ClassVar[bool] = True  # whether the method needs parameters to linearise in
    _first_step: ClassVar[str] = "conformalize"  # the call that must come before predictions

    # Parameters, as scikit-learn reads and clones them

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The arguments of the constructor, as they are stored."""
        kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        names = [name for name, p in inspect.signature(type(self)).parameters.items() if p.kind not in kinds]
        return {name: getattr(self, name) for name in names}

    def set_params(self, **params: Any) -> Self:
        """Change arguments of the constructor; what was learned stays until new data are given."""
        known = self.get_params()
        for name, value in params.items():
            if name not in known:
                raise ValueError(f"{name!r} is no parameter of {type(self).__name__}: it has {', '.join(known)}")
            setattr(self, name, value)
        return self

    def __repr__(self) -> str:
        shown = {name: brief(value) for name, value in self.get_params().items()}
        chosen = getattr(self, "curvature_choice_", None)
        if chosen is not None and shown["curvature"] == "'auto'":
            shown["curvature"] = f"'auto' ({chosen})"
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in shown.items())})"

    # Predictions

    def predict(self, X: object) -> Any:
        """Point predictions, (n,) or (n, O)."""
        rows = self._read_inputs(X)
        batches = self._batches(rows.x, gradients=self._centers_need_gradients())
        f = torch.cat([batch.f for _, batch in batches])
        return rows.origin.restore(f[:, 0] if f.shape[1] == 1 else f)

    def predict_interval(
        self, X: object, confidence_level: object = 0.9, *, joint: str | None = None, scales: object = None
    ) -> PredictionIntervals:
        """Point predictions and intervals.

        Parameters
        ----------
        X : array, tensor, frame or DataLoader (n, ...)
        confidence_level : float or sequence of L floats in (0, 1)
        joint : None, "bonferroni" or "max"
            With several outputs: None gives each output its own interval at the level, the others make the
            intervals of a row hold together at the level. "bonferroni" asks each for 1 - alpha / O; "max" ranks rows
            by the largest of their residuals over outputs, which is narrower. It needs a split or full conformal
            method, and for the full ones outputs that share no parameter (curvature="last_layer"); its intervals are
            centred on the prediction, whatever `residuals`.
        scales : None, float, or array (O,)
            For joint="max": in what units the residuals of outputs are compared, and so their widths. None is 1, for
            standardised targets. Data that calibrate must have no part in them.

        Returns
        -------
        PredictionIntervals
            A pair (prediction, intervals) of shapes (n,) and (n, 2, L), with O outputs (n, O) and (n, 2, L, O).
        """
        asked = read_levels(confidence_level)
        rows = self._read_inputs(X)
        levels, sizes = self._joint_levels(asked, joint), self._joint_scales(joint, scales, rows.x.device)
        self._warn_if_infinite(asked, levels, joint)
        done = [(batch.f, self._region(batch, levels, sizes)) for _, batch in self._batches(rows.x)]
        f, intervals = (torch.cat(parts) for parts in zip(*done, strict=True))
        if f.shape[1] == 1:
            f, intervals = f[:, 0], intervals[..., 0]
        return PredictionIntervals(
            rows.origin.restore(f), rows.origin.restore(intervals), tuple(float(level) for level in asked)
        )

    def predict_set(
        self, X: object, confidence_level: object = 0.9, *, joint: str | None = None, scales: object = None
    ) -> list[Any]:
        """The exact prediction set of each row, as disjoint closed intervals in order.

        Parameters
        ----------
        X : array, tensor, frame or DataLoader (n, ...)
        confidence_level : float
        joint, scales
            As in `predict_interval`. With "max" the set is the rectangle.

        Returns
        -------
        list
            For each row a list of (lower, upper) pairs; with several outputs a list of such lists, one an output.
            `predict_interval` gives the convex hull.
        """
        asked = [read_single_level(confidence_level)]
        rows = self._read_inputs(X)
        levels, sizes = self._joint_levels(asked, joint), self._joint_scales(joint, scales, rows.x.device)
        self._warn_if_infinite(asked, levels, joint)
        sets: list[Any] = []
        for _, batch in self._batches(rows.x):
            if sizes is None:
                pieces = self._pieces(batch, levels[0])
            else:
                ends = self._region(batch, levels, sizes)[:, :, 0]  # (m, 2, O)
                pieces = [[[(low, high)] for low, high in zip(*point, strict=True)] for point in ends.tolist()]
            sets += [outputs[0] if len(outputs) == 1 else outputs for outputs in pieces]
        return sets

    def p_value(self, X: object, y: object, *, joint: str | None = None, scales: object = None) -> Any:
        """The p-value of each label: it lies in the set of level 1 - alpha where the p-value exceeds alpha.

        Parameters
        ----------
        X : array, tensor, frame or DataLoader (n, ...)
        y : labels (n,) or (n, O), or one number for all
        joint : None, "bonferroni" or "max"
            None gives each output its own p-value, (n,) or (n, O); the others one a row for all outputs, (n,). With
            "max" it is that of the rectangles, for full methods no smaller than the conformal one.
        scales : as in `predict_interval`.
        """
        rows = self._read_inputs(X)
        outputs = self._outputs()
        labels = read_label(y, len(rows.x), outputs, rows.x.device)
        self._check_joint(joint)
        sizes = self._joint_scales(joint, scales, rows.x.device)
        parts = [
            self._p_values(batch, labels[where])
            if sizes is None
            else self._rectangle_p_values(batch, labels[where], sizes)
            for where, batch in self._batches(rows.x)
        ]
        p = torch.cat(parts)
        if joint == "bonferroni":
            p = (outputs * p.amin(1, keepdim=True)).clamp(max=1.0)
        return rows.origin.restore(p[:, 0] if p.shape[1] == 1 else p)

    # Saving

    def save(self, path: str | Path) -> None:
        """Write everything but the model to one safetensors file; the settings stand as JSON in its header.

        Methods that need the training rows again (full conformal prediction) put the inputs into the file, straight
        from the file they are in if they are not in memory. `load` brings them into memory.
        """
        self._check_fitted()
        state, facts = self._state()
        params = dict(self._settings)
        for name, value in self._settings.items():
            if not is_plain(value):
                state[f"param.{name}"] = (
                    value if isinstance(value, Tensor) else torch.from_numpy(np.array(value, float))
                )
                params[name] = None
        echo = self.network_.echo()
        if echo is not None:
            state["echo"] = echo
        header = {
            "class": type(self).__name__,
            "params": params,
            "facts": facts,
            "rows": self.n_rows_,
            "columns": self._columns,
            "network": self.network_.facts(),
            "model": self._fingerprint.digest(),
        }
        write_file(path, state, header)

    @classmethod
    def load(cls, path: str | Path, model: nn.Module) -> Self:
        """Read what `save` wrote; `model` must be the network it was made with, on any device."""
        return cls._load(path, {"model": model})

    @classmethod
    def _load(cls, path: str | Path, modules: dict[str, nn.Module | None]) -> Self:
        """Read a file; `modules` are the arguments of the constructor that no file holds, the model among them."""
        model = modules["model"]
        device = torch.device("cpu") if model is None else model_traits(model, trainable=False).device
        header, state = read_file(path, device)
        if header["class"] != cls.__name__:
            raise ValueError(f"path holds a {header['class']}, not a {cls.__name__}: {path}")
        params = {**header["params"], **modules}
        for key in [key for key in state if key.startswith("param.")]:
            params[key.removeprefix("param.")] = state.pop(key)
        loaded = cls(**params)
        fingerprint = loaded._recognise(header["model"])
        echo = state.pop("echo", None)
        network = loaded._restore(header["network"], state, header["facts"])
        if echo is not None and not alike(network.echo(), echo):
            raise ValueError("model is not the one that was saved: it has the same weights but other outputs")
        loaded._keep(network, header["rows"], header["columns"], fingerprint)
        return loaded

    def _recognise(self, digest: str) -> Fingerprint | None:
        """The fingerprint of the model, which must be the one that was saved."""
        fingerprint = Fingerprint(self.model)
        if fingerprint.digest() != digest:
            raise ValueError("model is not the one that was saved: its weights or buffers differ")
        return fingerprint

    # What a method must say

    @abstractmethod
    def _offsets(self, batch: Batch, levels: list[Fraction]) -> Tensor:
        """Ends of the intervals relative to the predictions, (m, 2, L, O)."""

    def _sets(self, batch: Batch, level: Fraction) -> list[list[list[Interval]]]:
        """The sets relative to the predictions; one interval each unless a method knows better."""
        ends = self._offsets(batch, [level])[:, :, 0]  # (m, 2, O)
        return [[[(low, high)] for low, high in zip(*point, strict=True)] for point in ends.tolist()]

    def _ends(self, batch: Batch, levels: list[Fraction]) -> Tensor:
        """Ends of the intervals, (m, 2, L, O)."""
        return batch.f[:, None, None] + self._offsets(batch, levels)

    def _pieces(self, batch: Batch, level: Fraction) -> list[list[list[Interval]]]:
        """The sets of each test point and output."""
        return [
            [[(c + low, c + high) for low, high in pieces] for c, pieces in zip(f, outputs, strict=True)]
            for f, outputs in zip(batch.f.tolist(), self._sets(batch, level), strict=True)
        ]

    @abstractmethod
    def _p_values(self, batch: Batch, y: Tensor) -> Tensor:
        """p-values of the labels y (m, O), (m, O)."""

    def _check_rectangles(self) -> None:
        """Refuse joint="max" where several outputs cannot be ranked together."""
        raise ValueError(
            f"joint='max' is for conformal methods, which rank one score a row; {type(self).__name__} takes "
            "joint='bonferroni'"
        )

    def _joint_scores(self, batch: Batch, scales: Tensor) -> JointScores | PrunedScores:
        """The scores that joint="max" ranks, for scales (O,); asked for only after `_check_rectangles`."""
        raise NotImplementedError

    @abstractmethod
    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and JSON facts from which `_restore` brings everything back."""

    @abstractmethod
    def _restore(self, network: dict[str, Any], state: dict[str, Tensor], facts: dict[str, Any]) -> Network:
        """Take up what `_state` gave; `network` are the facts about the network, which is returned."""

    def _predicting(self) -> nn.Module:
        """The module whose outputs predictions come from."""
        return self.model

    def _outputs(self) -> int:
        """How many numbers a label has."""
        return self.network_.outputs

    def _needs_gradients(self) -> bool:
        return True

    def _centers_need_gradients(self) -> bool:
        """Whether point predictions need gradients, too."""
        return False

    def _curvature(self) -> Curvature | None:
        """The curvature that test points are asked about, if there is one."""
        return getattr(self, "curvature_", None)

    def _points_at_once(self) -> int:
        """How many test points one batch may hold."""
        return points_within(self._curvature(), self.network_, self._budget() // 8)

    def _center(self, f: Tensor, phi: Tensor | None) -> Tensor:
        """The point prediction, from the network's output f (m, O) in float64."""
        return f

    def _rows_needed(self, level: Fraction) -> int:
        """How many rows a finite interval needs; methods without ranks need none."""
        return 0

    # Helpers

    def _budget(self) -> int:
        return parse_memory(self.memory)

    def _read_data(self, X: object, y: object, *, least: int = 2, traits: ModelTraits | None = None) -> Rows:
        """Check the data of a fit and copy them; a single row carries no spread."""
        self._budget()
        traits = traits or model_traits(self._predicting(), trainable=self._trainable)
        rows = read_rows(X, y, traits, copy=True, memory=self._budget())
        if len(rows.x) < least:
            raise ValueError(f"X has {len(rows.x)} row, at least {least} are needed")
        return rows

    def _read_inputs(self, X: object) -> Rows:
        self._check_fitted()
        rows = read_inputs(X, model_traits(self._predicting(), trainable=False), memory=self._budget())
        check_row_shape(rows.x, self.network_.row_shape)
        check_columns(rows.columns, self._columns)
        return rows

    def _check_targets(self, network: Network, rows: Rows) -> Tensor:
        assert rows.y is not None
        check_outputs(network.outputs, rows.y)
        return rows.y

    def _keep(
        self, network: Network, rows: int, columns: list[str] | None, fingerprint: Fingerprint | None = None
    ) -> None:
        """Remember what predictions rest on; called last, so that a failed fit leaves no half of one."""
        params = self.get_params()
        without = {name for name, value in params.items() if name == "model" or isinstance(value, nn.Module)}
        settings = {name: kept_setting(value) for name, value in params.items() if name not in without}
        if callable(settings.get("parameters")):
            settings["parameters"] = network.facts()["trainable"]  # no file holds a predicate, but what it chose
        fingerprint = fingerprint or Fingerprint(self._predicting())
        self._settings = {**settings, **self._earlier_settings()}
        self._fingerprint = fingerprint
        self._columns = columns
        self.n_rows_ = rows
        self.network_ = network

    def _earlier_settings(self) -> dict[str, Any]:
        """Settings that took effect in a step before the last one."""
        return {}

    def _is_fitted(self) -> bool:
        return hasattr(self, "network_")

    def _check_fitted(self) -> None:
        if not self._is_fitted():
            raise NotFittedError(f"{type(self).__name__}: call {self._first_step}(X, y) first")
        if not self._fingerprint.matches(self._predicting()):
            raise NotFittedError(
                f"{type(self).__name__}: the model has changed since {self._first_step}; call it again on the new model"
            )

    def _warn_if_infinite(self, asked: list[Fraction], levels: list[Fraction], joint: str | None) -> None:
        """Warn for the highest level asked for whose intervals are infinite for want of rows."""
        ranked = joint == "max" and self._outputs() > 1
        needed = [rows_needed(level, "absolute") if ranked else self._rows_needed(level) for level in levels]
        short = [(level, rows) for level, rows in zip(asked, needed, strict=True) if self.n_rows_ < rows]
        if short:
            level, rows = max(short)
            joint = f" (with {self._outputs()} outputs at once)" if asked != levels else ""
            warnings.warn(
                f"confidence_level {float(level):.6g}{joint} needs at least {rows} rows to conformalize on, there are "
                f"{self.n_rows_}: its intervals are infinite",
                InfiniteIntervalWarning,
                stacklevel=3,
            )

    def _check_joint(self, joint: object) -> None:
        if joint is not None:
            check_choice("joint", joint, JOINT, none=True)

    def _joint_levels(self, levels: list[Fraction], joint: str | None) -> list[Fraction]:
        self._check_joint(joint)
        return [bonferroni(level, self._outputs()) for level in levels] if joint == "bonferroni" else levels

    def _joint_scales(self, joint: str | None, scales: object, device: torch.device) -> Tensor | None:
        """The scales (O,) of joint="max"; None where outputs (or the only one) are taken one by one."""
        if joint != "max":
            if scales is not None:
                raise ValueError(f"scales are for joint='max', got joint={joint!r}")
            return None
        found, single = read_scales(scales, self._outputs(), device), self._outputs() == 1
        if not single:
            self._check_rectangles()
        return None if single else found

    def _region(self, batch: Batch, levels: list[Fraction], scales: Tensor | None) -> Tensor:
        """Ends of intervals or, with scales, of joint rectangles, (m, 2, L, O)."""
        if scales is None:
            return self._ends(batch, levels)
        return batch.f[:, None, None] + self._rectangles(batch, levels, scales)

    def _rectangles(self, batch: Batch, levels: list[Fraction], scales: Tensor) -> Tensor:
        """Ends of joint rectangles relative to the predictions, (m, 2, L, O)."""
        half = self._joint_scores(batch, scales).half_widths(levels)
        return torch.stack([-half, half], dim=1)

    def _rectangle_p_values(self, batch: Batch, y: Tensor, scales: Tensor) -> Tensor:
        """p-values of the labels y (m, O) by joint rectangles, (m, 1)."""
        return self._joint_scores(batch, scales).p_values(batch.f, y)

    def _batches(self, x: Inputs, *, gradients: bool | None = None) -> Iterator[tuple[slice, Batch]]:
        """The test points in batches, with their gradients where the method (or the caller) asks for them."""
        gradients = self._needs_gradients() if gradients is None else gradients
        size = self._points_at_once() if gradients else self.network_.rows_per_pass(self._budget() // 8)
        starts = range(0, len(x), size)
        for start in track(starts, "predicting", len(starts)):
            where = slice(start, min(start + size, len(x)))
            points = x[where]
            phi: Tensor | None = None
            if gradients:
                f, phi = look_at(self._curvature(), self.network_, points)
            else:
                f = self.network_.predict(points)
            check_all_finite(start, {"outputs": f, "gradients": phi})
            f = f.double()
            yield where, Batch(points, self._center(f, phi), phi, f)


__all__ = [
    "DEFAULT_MEMORY",
    "Batch",
    "InfiniteIntervalWarning",
    "NotFittedError",
    "PredictionIntervals",
    "Predictor",
    "kept_setting",
]
