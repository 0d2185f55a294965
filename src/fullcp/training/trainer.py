"""The paper's recipe: Adam on mini-batches, a cosine schedule, and l2 in the scale the predictors use."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fullcp.curvature import expand_l2
from fullcp.features import Network
from fullcp.inputs import check_outputs, check_positive_int, model_traits, read_rows
from fullcp.training.threads import one_thread_if_small


def train(
    model: nn.Module,
    X: object,
    y: object = None,
    *,
    l2: Any = 1.0,
    epochs: int = 1000,
    batch_size: int = 256,
    learning_rate: tuple[float, float] = (1e-2, 1e-5),
    seed: int = 0,
) -> list[float]:
    """Minimise sum_i 1/2 |y_i - f_i|^2 + 1/2 theta^T diag(l2) theta in place.

    The same `l2` then goes to the predictors. What Adam sees is the objective divided by the number of rows.

    Parameters
    ----------
    model : (n, ...) -> (n,) or (n, O)
    X : array, tensor or frame (N, ...), or a DataLoader of (inputs, targets)
    y : (N,) or (N, O); left out with a DataLoader
    l2 : float, or array of one value per parameter tensor or per parameter
    epochs, batch_size : int
        The last, smaller batch of an epoch is used too; a single row joins the batch before.
    learning_rate : (first, last)
        The ends of a cosine schedule over the epochs.
    seed : of the order of the rows.

    Returns
    -------
    list of float
        The objective a row, averaged over each epoch.

    Examples
    --------
    >>> X = torch.randn(64, 2)
    >>> losses = train(nn.Linear(2, 1), X, X.sum(1), l2=0.1, epochs=50)
    >>> losses[-1] < losses[0]
    True
    """
    check_positive_int("epochs", epochs)
    check_positive_int("batch_size", batch_size)
    first, last = _read_rates(learning_rate)
    traits = model_traits(model)
    rows = read_rows(X, y, traits)
    assert rows.y is not None
    check_outputs(Network(model, rows.x).outputs, rows.y)
    targets = rows.y.to(traits.dtype)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    parameters = list(named.values())
    penalty = torch.split(expand_l2(l2, named, traits.device), [p.numel() for p in parameters])
    weights = [(part / len(rows.x)).view_as(p).to(p.dtype) for part, p in zip(penalty, parameters, strict=True)]

    optimizer = torch.optim.Adam(parameters, lr=first)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs, eta_min=last)
    generator = torch.Generator().manual_seed(seed)
    modes = [(module, module.training) for module in model.modules()]
    model.train()
    losses: list[float] = []
    work = min(batch_size, len(rows.x)) * sum(p.numel() for p in parameters)
    try:
        with one_thread_if_small(work):
            for epoch in range(epochs):
                total = 0.0
                for batch in _batches(torch.randperm(len(rows.x), generator=generator), batch_size):
                    where = batch.to(traits.device)
                    optimizer.zero_grad(set_to_none=True)
                    loss = _objective(model, rows.x[where], targets[where], parameters, weights)
                    loss.backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                    total += loss.item() * len(batch)
                losses.append(total / len(rows.x))
                if not losses[-1] < float("inf"):
                    rate = schedule.get_last_lr()[0]
                    raise ValueError(
                        f"training diverged in epoch {epoch} (learning rate {rate:.3g}): the loss is {total}"
                    )
                schedule.step()
    finally:
        optimizer.zero_grad(set_to_none=True)
        for module, mode in modes:
            module.training = mode
    return losses


def _batches(order: Tensor, batch_size: int) -> list[Tensor]:
    """The order in batches; a last row alone joins the batch before, since BatchNorm cannot train on one row."""
    batches = list(torch.split(order, batch_size))
    if batch_size > 1 and len(batches) > 1 and len(batches[-1]) == 1:
        batches[-2:] = [torch.cat(batches[-2:])]
    return batches


def _objective(model: nn.Module, x: Tensor, y: Tensor, parameters: list[nn.Parameter], weights: list[Tensor]) -> Tensor:
    """Mean of 1/2 |y - f|^2 over the batch, and the penalty a row."""
    f = model(x).view_as(y)
    penalty = torch.stack([(w * p.square()).sum() for w, p in zip(weights, parameters, strict=True)]).sum()
    return ((y - f).square().sum() / len(y) + penalty) / 2


def _read_rates(learning_rate: tuple[float, float]) -> tuple[float, float]:
    try:
        first, last = (float(rate) for rate in learning_rate)
    except (TypeError, ValueError) as error:
        raise TypeError(f"learning_rate must be two numbers, (first, last), got {learning_rate!r}") from error
    if not 0 < last <= first < float("inf"):
        raise ValueError(f"learning_rate must be (first, last) with 0 < last <= first, got {learning_rate!r}")
    return first, last
