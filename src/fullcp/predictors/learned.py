"""A network that a method trains for itself, on rows that do not calibrate."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from fullcp.features import Network
from fullcp.features.network import normal
from fullcp.features.preserve import unwrap
from fullcp.inputs import (
    ModelTraits,
    Rows,
    check_all_finite,
    check_columns,
    check_positive_int,
    check_row_shape,
    model_traits,
)
from fullcp.predictors.fingerprint import Fingerprint, alike
from fullcp.predictors.seen import row_marks, warn_if_seen
from fullcp.sources import Inputs
from fullcp.training import Training, mlp, replicate, train

RECIPE = ("l2", "epochs", "batch_size", "learning_rate", "seed")
_PREFIX, _ECHO = "learned.", "learned_echo"


@dataclass(frozen=True)
class LearnedNetwork:
    """A trained network of the method's own; the user's module, if one was given, is its pattern and stays as it is.

    Attributes
    ----------
    made : what the library made the network of, for JSON; None where the user gave a module.
    training : how the training went; None in what was loaded.
    marks : of the rows given to train on, see `row_marks`; None in what was loaded.
    """

    network: Network
    columns: list[str] | None
    made: dict[str, Any] | None
    fingerprint: Fingerprint
    training: Training | None = None
    marks: Tensor | None = None

    @property
    def model(self) -> nn.Module:
        """The trained module."""
        return self.network.model

    @classmethod
    def train(
        cls,
        name: str,
        pattern: nn.Module | None,
        rows: Rows,
        targets: Tensor,
        outputs: int,
        traits: ModelTraits,
        *,
        seed: int,
        **recipe: Any,
    ) -> Self:
        """Train a copy of `pattern`, or the paper's network where it is None, as `fullcp.training.train` does.

        Parameters
        ----------
        name : of the argument that the pattern came in, for messages.
        outputs : how many the network must have.
        traits : where the library's own network is to live.
        recipe : as for `train`; with ``epochs=0`` the pattern is taken as it is, trained already.
        """
        check_positive_int("seed", seed, least=0)
        check_positive_int("epochs", recipe["epochs"], least=1 if pattern is None else 0)
        made = None if pattern is not None else _plan(name, rows.x, outputs, traits.dtype)
        with torch.inference_mode(False), torch.enable_grad():  # what is made in inference mode cannot be trained
            model = _copied(name, pattern, traits) if made is None else _make(made, traits.device, seed)
            x = normal(rows.tensor())
            _check_outputs(name, Network(model, x).outputs, outputs)
            marks = row_marks(rows)
            if recipe["epochs"] == 0:
                return cls(Network(model, x), rows.columns, made, Fingerprint(model), None, marks)
            training = train(model, x, normal(targets), seed=seed, **recipe)
            return cls(Network(model, x), rows.columns, made, Fingerprint(model), training, marks)

    def check_rows(self, rows: Rows) -> None:
        """Refuse rows unlike those that trained the network, and warn if they are the same."""
        check_row_shape(rows.x, self.network.row_shape)
        check_columns(rows.columns, self.columns)
        if self.marks is not None:
            warn_if_seen(self.marks, rows)

    def predict(self, x: Inputs, budget: int) -> Tensor:
        """Outputs (n, K) in float64, within `budget` bytes."""
        return predict_rows(self.network, x, budget)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and facts for `restore`."""
        tensors = {f"{_PREFIX}{name}": value for name, value in self.model.state_dict().items()}
        echo = self.network.echo()
        if echo is not None:
            tensors[_ECHO] = echo
        return tensors, {"network": self.network.facts(), "made": self.made, "columns": self.columns}

    @classmethod
    def restore(
        cls,
        name: str,
        pattern: nn.Module | None,
        device: torch.device,
        state: dict[str, Tensor],
        facts: dict[str, Any],
    ) -> Self:
        """Bring back what `state` gave: the weights go into a copy of `pattern`, or into the library's own network."""
        if pattern is None and facts["made"] is None:
            raise ValueError(f"{name} is missing: the file holds the weights for a network of yours, not its layers")
        model = deepcopy(unwrap(pattern)) if pattern is not None else _make(facts["made"], device, 0)
        weights = {key.removeprefix(_PREFIX): value for key, value in state.items() if key.startswith(_PREFIX)}
        try:
            model.load_state_dict(weights)
        except RuntimeError as error:
            raise ValueError(f"{name} is not the one that was saved: it has other layers ({error})") from error
        network = Network(model, facts=facts["network"])
        if _ECHO in state and not alike(network.echo(), state[_ECHO]):
            raise ValueError(f"{name} is not the one that was saved: it has the same weights but other outputs")
        return cls(network, facts["columns"], facts["made"], Fingerprint(model))


def predict_rows(network: Network, x: Inputs, budget: int) -> Tensor:
    """Outputs f (n, O) of all rows in float64, in chunks within `budget` bytes."""
    size = network.rows_per_chunk(budget)
    parts = []
    for start in range(0, len(x), size):
        parts.append(network.predict(x[start : start + size]).double())
        check_all_finite(start, {"outputs": parts[-1]})
    return torch.cat(parts)


def _plan(name: str, x: Inputs, outputs: int, dtype: torch.dtype) -> dict[str, Any]:
    """What the paper's network for these rows is made of."""
    if len(x.shape) != 2 or not x.dtype.is_floating_point:
        raise ValueError(
            f"{name} must be given for rows of shape {tuple(x.shape[1:])} and {x.dtype}: the network that is made "
            "where it is None takes a row of real numbers"
        )
    return {"inputs": x.shape[1], "outputs": outputs, "dtype": str(dtype).removeprefix("torch.")}


def _make(plan: dict[str, Any], device: torch.device, seed: int) -> nn.Module:
    (model,) = replicate(lambda: mlp(plan["inputs"], outputs=plan["outputs"]), [seed])
    return model.to(device, getattr(torch, plan["dtype"]))


def _copied(name: str, pattern: object, traits: ModelTraits) -> nn.Module:
    if not isinstance(pattern, nn.Module):
        raise TypeError(f"{name} must be a torch.nn.Module or None, got {type(pattern).__name__}")
    found = model_traits(pattern)
    if found.device != traits.device:
        raise ValueError(f"{name} is on {found.device}, the rows are on {traits.device}: move one of them")
    return deepcopy(unwrap(pattern))


def _check_outputs(name: str, found: int, wanted: int) -> None:
    if found != wanted:
        raise ValueError(
            f"{name} has {found} output(s), {wanted} are needed: it is the network that this method trains for itself. "
            "Leave it out for one that is made to fit"
        )
