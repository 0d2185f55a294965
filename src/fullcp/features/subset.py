"""Which parameters count: all that have requires_grad, or those of them that the user names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from fullcp.features.preserve import parameters_by_name, unwrap

Selection = str | Sequence[str] | Callable[[str, nn.Parameter], bool] | None


def select_parameters(model: nn.Module, parameters: object) -> list[str] | None:
    """The names of the parameters that were asked for, in the model's order; None where all count.

    Parameters
    ----------
    parameters : None, str, sequence of str, or callable
        Names of parameters or of modules, which stand for all parameters within; ``*`` and ``?`` are wildcards. A
        callable takes a name and the parameter, and says whether it counts. Only those with requires_grad do.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    >>> select_parameters(model, "2")
    ['2.weight', '2.bias']
    >>> select_parameters(model, lambda name, p: p.ndim == 1)
    ['0.bias', '2.bias']
    """
    if parameters is None:
        return None
    found = parameters_by_name(unwrap(model))
    if callable(parameters):
        chosen = {name for name, p in found.items() if parameters(name, p)}
        said = "the predicate"
    else:
        patterns = _patterns(parameters)
        chosen = {name for pattern in patterns for name in _matching(pattern, found)}
        said = f"{parameters!r}"
    if not chosen:
        raise ValueError(f"parameters: {said} chooses none of {_some(found)}")
    trainable = [name for name, p in found.items() if name in chosen and p.requires_grad]
    if not trainable:
        raise ValueError(f"parameters: {said} chooses {_some(sorted(chosen))}, none of which has requires_grad=True")
    return trainable


def _patterns(parameters: object) -> list[str]:
    patterns = [parameters] if isinstance(parameters, str) else parameters
    if not isinstance(patterns, Iterable):
        raise TypeError(f"parameters must be names or a callable, got {type(parameters).__name__}")
    patterns = list(patterns)
    if not patterns:
        raise ValueError("parameters is empty: name at least one, or pass None for all")
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"parameters must be names or a callable, got one {type(pattern).__name__} among them")
    return patterns


def _matching(pattern: str, found: dict[str, nn.Parameter]) -> list[str]:
    """Names that a pattern stands for; each pattern must stand for something."""
    names = [n for n in found if n == pattern or fnmatchcase(n, pattern) or fnmatchcase(n, f"{pattern}.*")]
    if not names:
        raise ValueError(f"parameters: {pattern!r} names no parameter and no module with any; there are {_some(found)}")
    return names


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
