"""l2, the ridge penalty: one number, one a parameter tensor, or one a parameter."""

from __future__ import annotations

from numbers import Real

import numpy as np
import torch
from torch import Tensor, nn


def expand_l2(l2: object, parameters: dict[str, nn.Parameter], device: torch.device) -> Tensor:
    """The diagonal of the penalty, float64 (D,).

    Parameters
    ----------
    l2 : number, or array of one value per parameter tensor ("layer") or one a parameter
        In the order of ``model.named_parameters()`` with requires_grad. Where both readings fit, they agree.

    Examples
    --------
    >>> layer = nn.Linear(2, 1)
    >>> expand_l2([1.0, 5.0], dict(layer.named_parameters()), torch.device("cpu")).tolist()
    [1.0, 1.0, 5.0]
    """
    sizes = [p.numel() for p in parameters.values()]
    values = _as_vector(l2, device)
    if not torch.isfinite(values).all() or (values < 0).any():
        bad = values[~torch.isfinite(values) | (values < 0)][0].item()
        raise ValueError(f"l2 must be finite and not negative, got {bad}")
    if len(values) == 1:
        return values.expand(sum(sizes)).clone()
    if len(values) == len(sizes):
        return torch.repeat_interleave(values, torch.tensor(sizes, device=device))
    if len(values) == sum(sizes):
        return values
    raise ValueError(
        f"l2 must be one number, {len(sizes)} values (one a parameter tensor) or {sum(sizes)} (one a parameter), "
        f"got {len(values)}"
    )


def _as_vector(l2: object, device: torch.device) -> Tensor:
    if l2 is None or isinstance(l2, (bool, str)):
        raise TypeError(f"l2 must be a number or an array of numbers (or 'marglik' for a predictor), got {l2!r}")
    if isinstance(l2, Real):
        return torch.tensor([float(l2)], dtype=torch.float64, device=device)
    if isinstance(l2, Tensor):
        values = l2.detach().to(device, torch.float64)
    else:
        try:
            values = torch.from_numpy(np.array(l2, dtype=np.float64)).to(device)
        except (TypeError, ValueError) as error:
            raise TypeError(f"l2 must be a number or an array of numbers, got {type(l2).__name__}: {error}") from error
    if values.ndim > 1 or values.numel() == 0:
        raise ValueError(f"l2 must be a number or a one-dimensional array, got shape {tuple(values.shape)}")
    return values.reshape(-1).clone()
