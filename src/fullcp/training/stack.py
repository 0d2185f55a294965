"""B networks of one architecture as one: weights side by side in a matrix, outputs and gradients for all at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from fullcp.features.preserve import parameters_by_name

# What the buffers of a block of networks may take. On a CPU they should stay near the cache: 100 networks of 50 units
# with batches of 256 take 20 MB, and twice that is slower a network.
_CPU_WORKSPACE = 32 * 2**20
_GPU_WORKSPACE = 8 * 2**30

ALL = slice(None)
LossGradient = Callable[[slice, Tensor], Tensor]


class NotStackableError(Exception):
    """The networks cannot be run in this way."""


class Stack(ABC):
    """B networks with their trainable weights theta (B, P), in the order of ``named_parameters()``.

    Parameters
    ----------
    models : networks of one architecture; they are read here and never written to; `put` does that.
    """

    name: str
    may_draw = True  # whether its networks may use random numbers in training

    def __init__(self, models: Sequence[nn.Module]):
        self.models = list(models)
        named = trainable(self.models[0])
        self.shapes = {name: p.shape for name, p in named.items()}
        self.sizes = [p.numel() for p in named.values()]
        rows = [torch.cat([p.detach().reshape(-1) for p in trainable(model).values()]) for model in self.models]
        self.theta = torch.stack(rows)
        self.grad = torch.zeros_like(self.theta)
        self._remembered = self.theta.clone()

    def __len__(self) -> int:
        return len(self.theta)

    @property
    def size(self) -> int:
        """P, the number of trainable parameters of one network."""
        return sum(self.sizes)

    @abstractmethod
    def predict(self, x: Tensor) -> Tensor:
        """Outputs (B, n, O), as in evaluation, for rows x (B, n, ...)."""

    @abstractmethod
    def gradients(self, x: Tensor, loss: LossGradient, counts: Tensor | None = None) -> None:
        """Fill `grad` with the gradients of a loss on rows x (B, n, ...), in blocks of networks.

        Parameters
        ----------
        loss : takes a block of networks and their outputs f (b, n, O), returns dL/df.
        counts : Tensor (B,) or None
            How many of the n rows are a network's own; `loss` gives the others no weight.
        """

    @abstractmethod
    def jacobian(self, x: Tensor, block: slice = ALL) -> tuple[Tensor, Tensor]:
        """Outputs f (b, n, O) and gradients phi (b, n, O, P) of a block of networks on rows x (b, n, ...).

        As in evaluation, not as in training.
        """

    def remember(self, which: Tensor) -> None:
        """Keep the present weights of the networks chosen by a mask (B,), in place of those kept before."""
        self._remembered[which] = self.theta[which]

    def recall(self) -> None:
        """Go back to the weights kept last."""
        self.theta.copy_(self._remembered)

    def keep(self, which: Tensor) -> None:
        """Go on with the networks at the indices `which` alone."""
        self.models = [self.models[i] for i in which.tolist()]
        self.theta, self.grad = self.theta[which].clone(), self.grad[which].clone()
        self._remembered = self._remembered[which].clone()

    def weights(self, b: int) -> list[Tensor]:
        """What `put` wants of network b: its weights, and its buffers where training changes them."""
        return [self.theta[b].clone()]

    @staticmethod
    def put(model: nn.Module, weights: list[Tensor]) -> None:
        """Write what `weights` gave into a module."""
        parameters = list(trainable(model).values())
        with torch.no_grad():
            for p, values in zip(parameters, torch.split(weights[0], [p.numel() for p in parameters]), strict=True):
                p.copy_(values.view_as(p))
            if len(weights) > 1:
                for buffer, value in zip(model.buffers(), weights[1:], strict=True):
                    buffer.copy_(value)

    def state(self) -> dict[str, Tensor]:
        """Tensors from which `restore` brings the weights back."""
        return {"theta": self.theta, "remembered": self._remembered}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take up what `state` gave, for the same networks."""
        self.theta.copy_(state["theta"])
        self._remembered.copy_(state["remembered"])

    def blocks(self, bytes_a_network: int) -> Iterator[slice]:
        """Blocks of networks whose buffers fit into the workspace."""
        room = _CPU_WORKSPACE if self.theta.device.type == "cpu" else _GPU_WORKSPACE
        size = max(1, min(len(self), room // max(bytes_a_network, 1)))
        size = -(-len(self) // -(-len(self) // size))  # of even sizes
        for start in range(0, len(self), size):
            yield slice(start, min(start + size, len(self)))


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that training changes."""
    return {name: p for name, p in parameters_by_name(model).items() if p.requires_grad}
