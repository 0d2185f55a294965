"""What training is asked to do, for one network or for many, checked before any long work."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def read_models(models: Any) -> list[nn.Module]:
    """The networks, each a module of its own that training can run with other weights."""
    if isinstance(models, nn.Module):
        raise TypeError(f"models must be a list of torch modules, got one {type(models).__name__}")
    found = list(models)
    if not found:
        raise ValueError("models is empty")
    for b, model in enumerate(found):
        if not isinstance(model, nn.Module):
            raise TypeError(f"models must be torch modules, got {type(model).__name__}")
        check_not_scripted(model, f"model {b}")
    if len({id(model) for model in found}) < len(found):
        raise ValueError("models holds the same module twice: each network needs its own, see replicate")
    return found


def check_not_scripted(model: nn.Module, name: str = "model") -> None:
    """Refuse what torch.jit made: it does not let its weights be replaced for a while, as training does."""
    for part in model.modules():
        if isinstance(part, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
            raise TypeError(
                f"{name} is or holds a torch.jit module, which can predict but not be trained here: give the module "
                "that it was made from"
            )


def per_network(name: str, value: Any, networks: int) -> list[Any]:
    """One value a network: lists and tuples hold one each, all else goes for all."""
    if not isinstance(value, (list, tuple)):
        return [value] * networks
    if len(value) != networks:
        raise ValueError(f"{name} has {len(value)} values for {networks} networks (an array or tensor goes for all)")
    return list(value)


def read_seeds(seed: Any, networks: int) -> Tensor:
    """A seed a network, (B,); from one number s network b has s + b."""
    if isinstance(seed, Integral) and not isinstance(seed, bool):
        values = [int(seed) + b for b in range(networks)]
    elif isinstance(seed, (bool, str, bytes)) or not np.iterable(seed):
        raise TypeError(f"seed must be a whole number, or one a network, got {seed!r}")
    else:
        values = seed.tolist() if hasattr(seed, "tolist") else list(seed)
        if len(values) != networks:
            raise ValueError(f"seed has {len(values)} values for {networks} networks")
        bad = next((value for value in values if isinstance(value, bool) or not isinstance(value, Integral)), None)
        if bad is not None:
            raise TypeError(f"seed must hold whole numbers, got {bad!r}")
    if not all(-(2**63) <= value < 2**63 for value in values):
        raise ValueError(f"seed must be of 64 bits, from -2**63 to 2**63 - 1 for each network, got {seed!r}")
    return torch.tensor([int(value) for value in values])


def read_noise(noise: Any, networks: int) -> Tensor:
    """A standard deviation of the noise a network, (B,) in float64."""
    if isinstance(noise, (bool, str, bytes)) or not (isinstance(noise, Real) or np.iterable(noise)):
        raise TypeError(f"noise must be a positive number, or one a network, got {noise!r}")
    values = [noise] * networks if isinstance(noise, Real) else [getattr(v, "item", lambda v=v: v)() for v in noise]
    if len(values) != networks:
        raise ValueError(f"noise has {len(values)} values for {networks} networks")
    if not all(isinstance(v, Real) and 0 < float(v) < float("inf") for v in values):
        raise ValueError(f"noise must be positive and finite, got {noise!r}")
    return torch.tensor([float(v) for v in values], dtype=torch.float64)


def read_rates(learning_rate: Any) -> tuple[float, float]:
    """The ends of a schedule."""
    try:
        first, last = (float(rate) for rate in learning_rate)
    except (TypeError, ValueError) as error:
        raise TypeError(f"learning_rate must be two numbers, (first, last), got {learning_rate!r}") from error
    if not 0 < last <= first < float("inf"):
        raise ValueError(f"learning_rate must be (first, last) with 0 < last <= first, got {learning_rate!r}")
    return first, last
