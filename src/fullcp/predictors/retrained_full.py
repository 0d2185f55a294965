"""FCP: exact full conformal prediction, every label tried by training the network on it."""

from __future__ import annotations

import copy
from fractions import Fraction
from math import floor, inf
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from fullcp.candidates import accepted, grid_over, or_the_best, runs
from fullcp.curvature import expand_l2
from fullcp.features import FeatureRows, Jacobian, Network
from fullcp.features.preserve import parameters_by_name
from fullcp.influence import RESIDUALS
from fullcp.inputs import check_choice, check_positive_int
from fullcp.predictors.base import DEFAULT_MEMORY, Batch
from fullcp.predictors.candidate import CandidatePredictor
from fullcp.predictors.retraining import Retraining, fresh
from fullcp.regions import Interval
from fullcp.sources import Inputs
from fullcp.training.arguments import check_not_scripted, read_rates
from fullcp.training.run import Recipe
from fullcp.training.stack import trainable
from fullcp.tuning import settle, tuning_facts, tuning_from

STARTS = ("fresh", "trained")
_MOST_DOUBLINGS = 40  # of the step outwards from the end of the grid


class RetrainedFullConformalRegressor(CandidatePredictor):
    """Exact full conformal prediction: for every test point and candidate label the network is trained again (FCP).

    All N + 1 residuals are those of a network trained on the training rows and the test point with that label.
    Coverage is guaranteed, whatever the network, if the training treats all rows alike: from fresh weights and in full
    batches, as it is by default. It takes m x K trainings, which run as ensembles; what is known is kept, so that
    another level or `predict_set` after `predict_interval` costs none. For one output.

    Parameters
    ----------
    model : torch.nn.Module
        The trained network, (n, ...) -> (n,) or (n, 1). It is never changed. It gives the point prediction, and says
        what network to train.
    residuals : "absolute" or "signed"
    l2 : "marglik", float, or array of one value per parameter tensor or per parameter
        The ridge penalty of every training, in sum scale; "marglik" tunes it once, on the network given, by the
        Laplace marginal likelihood. A penalty tuned on the training rows alone costs the guarantee its last word.
    candidates : int or array (K,)
        How many labels to try, evenly spaced over the range of the training targets, or the labels themselves.
    precision : float or None
        None: intervals end at candidates. A number, in the units of y: from the candidates on, each end is found by
        bisection to within this, and looked for beyond the grid where the grid does not reach it.
    epochs : int
    batch_size : int or None
        None is all rows at once. Smaller batches serve large data.
    learning_rate : (first, last)
        Of a cosine schedule over the epochs of Adam.
    start : "fresh" or "trained"
        Where trainings start: from new initial weights, the same for all, or from those of the network given. The
        latter needs fewer epochs, and treats the test point unlike the rows that the network has seen.
    seed : of the fresh weights, and of the order of the rows in batches.
    checkpoint : path or None
        A file that is written every ten seconds while predicting, and where the work is interrupted: the same call
        then goes on there.
    memory : str or int
        Working memory, such as "2GB".

    Attributes
    ----------
    grid_ : the candidate labels, a float64 tensor.
    n_rows_ : number of training rows.
    tuning_ : the tuned l2 and noise; None where l2 was given.

    Examples
    --------
    >>> import torch, fullcp
    >>> _ = torch.manual_seed(0)
    >>> X = torch.randn(30, 2)
    >>> y = X.sum(1) + 0.1 * torch.randn(30)
    >>> net = torch.nn.Linear(2, 1)
    >>> cp = fullcp.RetrainedFullConformalRegressor(net, l2=0.1, epochs=300, candidates=20).conformalize(X, y)
    >>> cp.predict_interval(X[:3], confidence_level=[0.8, 0.9]).intervals.shape
    torch.Size([3, 2, 2])
    """

    def __init__(
        self,
        model: nn.Module,
        residuals: str = "absolute",
        l2: Any = "marglik",
        *,
        candidates: Any = 50,
        precision: float | None = None,
        epochs: int = 500,
        batch_size: int | None = None,
        learning_rate: Any = (1e-2, 1e-5),
        start: str = "fresh",
        seed: int = 0,
        checkpoint: str | Path | None = None,
        memory: str | int = DEFAULT_MEMORY,
    ):
        self.model = model
        self.residuals = residuals
        self.l2 = l2
        self.candidates = candidates
        self.precision = precision
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.start = start
        self.seed = seed
        self.checkpoint = checkpoint
        self.memory = memory

    def conformalize(self, X: object, y: object = None) -> Self:
        """Take up the training rows, and lay the grid over their targets; the trainings wait for test points.

        Parameters
        ----------
        X : array, tensor or frame (N, ...), or a DataLoader of (inputs, targets)
        y : (N,) or (N, 1); left out with a DataLoader
        """
        check_choice("residuals", self.residuals, RESIDUALS)
        check_choice("start", self.start, STARTS)
        if isinstance(self.precision, bool) or not isinstance(self.precision, (Real, type(None))):
            raise TypeError(f"precision must be None or a number in the units of y, got {self.precision!r}")
        if self.precision is not None and not 0 < self.precision < inf:
            raise ValueError(f"precision must be None or a positive number in the units of y, got {self.precision!r}")
        check_positive_int("seed", self.seed, least=0)
        rows = self._read_data(X, y)
        check_not_scripted(self.model)
        x = rows.tensor()
        assert rows.y is not None
        recipe = self._recipe(len(x))
        grid = grid_over(self.candidates, rows.y.flatten())
        network = Network(self.model, x)
        if network.outputs > 1:
            raise ValueError(f"model has {network.outputs} outputs: candidates form a grid over one label only")
        targets = self._check_targets(network, rows)
        l2, tuning = self.l2, None
        if isinstance(l2, str):
            features = FeatureRows(Jacobian(self.model, x), x, memory=self._budget())
            l2, tuning = settle(l2, features, targets - features.predictions, "full")
        names = trainable(self.model)
        penalty = expand_l2(l2, names, x.device)
        self._assemble(x, targets[:, 0], penalty, list(names), recipe, grid, self.residuals)
        self.tuning_ = tuning
        self._keep(network, len(x), rows.columns)
        return self

    def _recipe(self, count: int) -> Recipe:
        epochs = check_positive_int("epochs", self.epochs)
        batch_size = count + 1 if self.batch_size is None else check_positive_int("batch_size", self.batch_size)
        return Recipe(epochs, batch_size, read_rates(self.learning_rate))

    def _assemble(
        self, x: Tensor, y: Tensor, l2: Tensor, names: list[str], recipe: Recipe, grid: Tensor, residuals: str
    ) -> None:
        initial = fresh(self.model, self.seed) if self.start == "fresh" else copy.deepcopy(self.model)
        for name, p in parameters_by_name(initial).items():
            p.requires_grad_(name in names)  # as they were when the method was given its data
        self._retraining = Retraining(
            initial,
            x,
            y,
            l2=l2,
            recipe=recipe,
            seed=self.seed,
            residuals=residuals,
            memory=self._budget(),
            checkpoint=self.checkpoint,
        )
        self.grid_ = grid

    def _needs_gradients(self) -> bool:
        return False

    def _batches(self, x: Inputs, *, gradients: bool | None = None) -> Any:
        yield from super()._batches(x, gradients=False)

    def _tails(self, batch: Batch, labels: Tensor) -> Tensor:
        return self._retraining.tails(batch.x, labels)

    # Ends by bisection

    def _ends(self, batch: Batch, levels: list[Fraction]) -> Tensor:
        if self.precision is None:
            return super()._ends(batch, levels)
        sets = [self._fine_pieces(batch, level) for level in levels]
        ends = [[[pieces[0][0], pieces[-1][1]] for pieces in points] for points in sets]
        return torch.tensor(ends, dtype=torch.float64, device=batch.f.device).permute(1, 2, 0).unsqueeze(3)

    def _pieces(self, batch: Batch, level: Fraction) -> list[list[list[Interval]]]:
        if self.precision is None:
            return super()._pieces(batch, level)
        return [[pieces] for pieces in self._fine_pieces(batch, level)]

    def _fine_pieces(self, batch: Batch, level: Fraction) -> list[list[Interval]]:
        """The sets of each test point, with ends to within the precision."""
        m, N = len(batch.f), self.n_rows_
        signs = 1 if self._retraining.residuals == "absolute" else 2
        if floor((1 - level) * (N + 1) / signs) == 0:
            return [[(-inf, inf)]] * m  # no label can be refused with so few rows
        # The prediction is a candidate too: it lies in all but odd sets, and those of small levels fall between others.
        labels = torch.cat([self.grid_.expand(m, -1), batch.f], dim=1).sort(dim=1).values
        tails = self._tails(batch, labels)
        truly = accepted(tails, N, level)
        member = or_the_best(truly, tails, labels - batch.f)
        found = [runs(labels[j], row) for j, row in enumerate(member.cpu())]
        edges = _Edges(labels, found, skip=~truly.any(1))
        assert self.precision is not None
        self._bisect(batch, level, edges, self.precision)
        return edges.pieces()

    def _bisect(self, batch: Batch, level: Fraction, edges: _Edges, precision: float) -> None:
        """Move accepted and refused labels towards one another until they are close."""

        def accepts(which: Tensor, labels: Tensor) -> Tensor:
            x = batch.x[edges.point[which].to(batch.x.device)]
            tails = self._retraining.tails(x, labels.to(x.device).unsqueeze(1))
            return accepted(tails, self.n_rows_, level)[:, 0].cpu()

        step = (self.grid_[-1] - self.grid_[0]).item() / max(1, len(self.grid_) - 1) or 1.0
        for doubling in range(_MOST_DOUBLINGS):
            open_ones = edges.refused.isinf().nonzero()[:, 0]
            if not len(open_ones):
                break
            beyond = edges.accepted[open_ones] + edges.side[open_ones] * step * 2**doubling
            inside = accepts(open_ones, beyond)
            edges.accepted[open_ones[inside]] = beyond[inside]
            edges.refused[open_ones[~inside]] = beyond[~inside]
        while True:
            gap = (edges.refused - edges.accepted).abs()
            middle = (edges.refused + edges.accepted) / 2
            wide = (
                (gap > precision) & gap.isfinite() & (middle != edges.accepted) & (middle != edges.refused)
            ).nonzero()[:, 0]
            if not len(wide):
                return
            inside = accepts(wide, middle[wide])
            edges.accepted[wide[inside]] = middle[wide[inside]]
            edges.refused[wide[~inside]] = middle[wide[~inside]]

    def _warn_about_grid(self, ends: Tensor, levels: list[Fraction]) -> None:
        if self.precision is None:
            super()._warn_about_grid(ends, levels)

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        known = self._retraining
        state = {"x": known.x, "y": known.y, "penalty": known.l2, "grid": self.grid_}
        facts = {"residuals": known.residuals, "trainable": list(trainable(known.initial))}
        return state, {**facts, "tuning": tuning_facts(self.tuning_)}

    def _restore(self, network: dict[str, Any], state: dict[str, Tensor], facts: dict[str, Any]) -> Network:
        recipe = self._recipe(len(state["x"]))
        self._assemble(
            state["x"], state["y"], state["penalty"], facts["trainable"], recipe, state["grid"], facts["residuals"]
        )
        self.tuning_ = tuning_from(facts["tuning"])
        return Network(self.model, facts=network)


class _Edges:
    """Both ends of all runs of accepted labels: an accepted label, and a refused one further out.

    Attributes
    ----------
    point : Tensor (E,), the test point of each edge.
    side : Tensor (E,), -1 for lower ends, 1 for upper ones.
    accepted, refused : Tensor (E,), labels; infinite where the grid holds no refused one on that side.
    """

    def __init__(self, labels: Tensor, found: list[list[Interval]], *, skip: Tensor):
        self.found, self.skip = found, skip.tolist()
        point, side, inner, outer = [], [], [], []
        for j, pieces in enumerate(found):
            if self.skip[j]:
                continue
            row = [-inf, *labels[j].tolist(), inf]
            for low, high in pieces:
                point += [j, j]
                side += [-1.0, 1.0]
                inner += [low, high]
                outer += [row[row.index(low) - 1], next(label for label in row if label > high)]
        self.point = torch.tensor(point, dtype=torch.int64)
        self.side, self.accepted, self.refused = (
            torch.tensor(values, dtype=torch.float64) for values in (side, inner, outer)
        )

    def pieces(self) -> list[list[Interval]]:
        """The runs with their ends where they are now."""
        # An end that was never refused, however far out, is infinite.
        ends = torch.where(self.refused.isinf(), self.refused, self.accepted).tolist()
        fine: list[list[Interval]] = []
        at = 0
        for j, pieces in enumerate(self.found):
            if self.skip[j]:
                fine.append(pieces)
                continue
            fine.append([(ends[at + 2 * i], ends[at + 2 * i + 1]) for i in range(len(pieces))])
            at += 2 * len(pieces)
        return fine
