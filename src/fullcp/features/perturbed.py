"""A network at many other weights at once: theta_* + t v for steps t along directions v."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from fullcp.features.jacobian import Jacobian
from fullcp.features.network import Network, normal
from fullcp.features.outputs import as_rows
from fullcp.features.preserve import BORROWING
from fullcp.inputs import check_all_finite
from fullcp.memory import rows_within
from fullcp.sources import Inputs

Weights = dict[str, Tensor]
# On a CPU, larger chunks win nothing: their activations leave the cache.
_CACHE = 16 * 2**20
_AGREEMENT = {torch.float64: 1e-9, torch.float32: 1e-4}
_AGREEMENT_HALF = 5e-2


class PerturbedNetwork:
    """Outputs of a network at P sets of weights, in its own dtype; the module itself is left as it is.

    torch.func runs all sets side by side, where a few rows show that it gives the right numbers; otherwise the weights
    are put into the module one set after the other (and taken out again).

    Parameters
    ----------
    jacobian : the network; its parameters are the ones that move.
    x : Tensor or StoredRows (n, ...)
        Rows to try it on.

    Examples
    --------
    >>> net = torch.nn.Linear(1, 1, bias=False)
    >>> _ = torch.nn.init.constant_(net.weight, 2.0)
    >>> x = torch.tensor([[1.0], [3.0]])
    >>> perturbed = PerturbedNetwork(Jacobian(net, x), x)
    >>> weights = perturbed.weights(torch.ones(1, 1), torch.tensor([0, 0]), torch.tensor([0.0, 0.5]))
    >>> perturbed(weights, x).tolist()
    [[2.0, 6.0], [2.5, 7.5]]
    """

    def __init__(self, jacobian: Jacobian, x: Inputs):
        self.jacobian = jacobian
        parameters = jacobian.parameters
        largest = max(p.numel() for p in parameters.values())
        self._bytes = (jacobian.size + largest) * (8 + torch.finfo(jacobian.dtype).bits // 8)  # of one set of weights
        self._on_cpu = x.device.type == "cpu"
        self.vectorised = self._can_vectorise(x[:3])

    def weights(self, v: Tensor, which: Tensor, t: Tensor) -> Weights:
        """The weights theta_* + t_p v[which_p] of each parameter, (P, ...), for directions v (m, D) and t (P,)."""
        moved, start = {}, 0
        with BORROWING:
            for name, p in self.jacobian.parameters.items():
                part = v[:, start : start + p.numel()].view(-1, *p.shape)
                step = part[which] * t.view(-1, *[1] * p.ndim)
                moved[name] = step.add_(p.detach()).to(p.dtype)
                start += p.numel()
        return moved

    def __call__(self, weights: Weights, x: Tensor) -> Tensor:
        """Outputs of the rows x (n, ...) at each set of weights, float64 (P, n); of a network with one output."""
        return self._run(weights, x, shared=True)

    def own(self, weights: Weights, x: Tensor) -> Tensor:
        """Outputs of the rows x (P, ...), each at its own weights, float64 (P,)."""
        return self._run(weights, x.unsqueeze(1), shared=False)[:, 0]

    def rows_at_once(self, budget: int, count: int) -> int:
        """How many of `count` rows to pass through at a time."""
        return rows_within(budget // 2, Network.bytes_per_row(self.jacobian), at_most=count)  # without gradients

    def sets_at_once(self, budget: int, rows: int) -> int:
        """How many sets of weights to hold at a time, when each sees `rows` rows at a time."""
        if self._on_cpu:
            budget = min(budget, _CACHE)
        per_set = self._bytes + rows * (Network.bytes_per_row(self.jacobian) + 4 * 8)  # residuals and their sizes
        return rows_within(budget, per_set, at_most=4096)

    def _run(self, weights: Weights, x: Tensor, *, shared: bool) -> Tensor:
        x = normal(x)
        with self.jacobian.borrowed(), torch.no_grad():
            f = self._vectorised(weights, x, shared) if self.vectorised else self._one_by_one(weights, x, shared)
        f = f.double()
        check_all_finite(None, {"outputs (with the weights for a candidate label)": f})
        return f

    def _vectorised(self, weights: Weights, x: Tensor, shared: bool) -> Tensor:
        def outputs(weights: Weights, x: Tensor) -> Tensor:
            return as_rows(functional_call(self.jacobian.model, weights, (x,)), len(x))[:, 0]

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="There is a performance drop")
            return vmap(outputs, in_dims=(0, None if shared else 0))(weights, x)

    def _one_by_one(self, weights: Weights, x: Tensor, shared: bool) -> Tensor:
        parameters = self.jacobian.parameters
        before = {name: p.detach().clone() for name, p in parameters.items()}
        count = len(next(iter(weights.values())))
        found = []
        try:
            for i in range(count):
                for name, p in parameters.items():
                    p.copy_(weights[name][i])
                rows = x if shared else x[i]
                found.append(as_rows(self.jacobian.model(rows), len(rows))[:, 0])
        finally:
            for name, p in parameters.items():
                p.copy_(before[name])
        return torch.stack(found)

    def _can_vectorise(self, x: Tensor) -> bool:
        """Whether torch.func gives what the module itself does, at its own weights and at others."""
        size = self.jacobian.size
        v = torch.cos(torch.arange(size, device=x.device, dtype=torch.float64)).unsqueeze(0)  # any direction
        scale = torch.stack([p.detach().double().abs().amax() for p in self.jacobian.parameters.values()]).amax()
        weights = self.weights(v, torch.zeros(2, dtype=torch.long, device=x.device), scale * v.new_tensor([0.0, 0.01]))
        x = normal(x)
        each = torch.stack([x[:1], x[-1:]])
        with self.jacobian.borrowed(), torch.no_grad():
            expected = self._one_by_one(weights, x, True), self._one_by_one(weights, each, False)
            try:
                found = self._vectorised(weights, x, True), self._vectorised(weights, each, False)
            except Exception:
                return False
        share = _AGREEMENT.get(self.jacobian.dtype, _AGREEMENT_HALF)
        return all(
            bool((a - b).abs().amax() <= share * b.abs().amax() + torch.finfo(b.dtype).tiny)
            for a, b in zip(found, expected, strict=True)
        )
