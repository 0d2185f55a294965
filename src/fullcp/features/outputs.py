"""What a module must return to be a regressor, and the checks that its rows do not mix."""

from __future__ import annotations

import torch
from torch import Tensor, nn

# Two forward passes of the same rows in different batches differ by rounding alone; a module that mixes rows is
# off by far more. The factors leave room for TF32 and for other summation orders.
_ROUNDING = {torch.float64: 1e-8, torch.float32: 2e-3}
_ROUNDING_HALF = 5e-2


def as_rows(output: object, count: int) -> Tensor:
    """The output of a module on `count` rows as (count, O), or a refusal that says why not."""
    if not isinstance(output, Tensor):
        raise TypeError(
            f"model must return one tensor, got {type(output).__name__}: wrap it in a module that picks one"
        )
    if output.ndim == 1 and len(output) == count:
        return output.unsqueeze(1)
    if output.ndim != 2 or output.shape[0] != count or output.shape[1] == 0:
        raise ValueError(
            f"model must return one row of numbers an example, shape ({count},) or ({count}, outputs), "
            f"got {tuple(output.shape)}{'; use squeeze(-1) instead of squeeze()' if output.ndim == 0 else ''}"
        )
    if not output.is_floating_point():
        raise TypeError(f"model must return floating-point numbers, got {output.dtype}")
    return output


def check_row_independence(model: nn.Module, rows: Tensor) -> Tensor:
    """Refuse a module whose output for a row depends on the other rows or on chance; return its outputs (n, O)."""
    with torch.no_grad():
        try:
            together = as_rows(model(rows), len(rows))
        except (RuntimeError, IndexError) as error:
            hint = "" if rows.is_floating_point() else "; whole numbers reach the model as they are: use X.float()"
            raise ValueError(
                f"X: the model cannot process rows of shape {tuple(rows.shape[1:])}: {error}{hint}"
            ) from error
        if not torch.isfinite(together).all():
            raise ValueError("model predicts NaN or infinite values")
        scale = together.abs().amax() + torch.finfo(together.dtype).tiny
        tolerance = _ROUNDING.get(together.dtype, _ROUNDING_HALF) * scale
        again = as_rows(model(rows), len(rows))
        if (again - together).abs().amax() > tolerance:
            raise ValueError("model gives random outputs in evaluation mode (dropout applied by hand?)")
        try:
            alone = torch.cat([as_rows(model(row.unsqueeze(0)), 1) for row in rows])
        except (RuntimeError, ValueError, IndexError) as error:
            raise ValueError(
                f"model cannot predict one row on its own, so its rows have no meaning: {error}"
            ) from error
    if (alone - together).abs().amax() > tolerance:
        raise ValueError(
            "model mixes rows: its output for a row changes with the other rows of the batch "
            "(BatchNorm without running statistics, a normalisation over the batch?)"
        )
    return together
