"""Who a network or a loss is, as a hash that another process finds again: what decides whether a file is of this run.

An object is its type and what it holds, a function its code and what that refers to. Nothing is taken from addresses in
memory or from `repr`, which may show some. What belongs to torch, NumPy or this library is told by its name alone.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import sys
import types
from collections import deque
from collections.abc import Iterable
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fullcp.features.preserve import unwrap

_NUMBERS = (bool, int, float, complex, str, bytes)
_PLAIN = (*_NUMBERS, type(None), Decimal, Fraction, PurePath, np.generic, torch.dtype, torch.device, torch.Size)
_LIBRARIES = frozenset({"torch", "numpy", "scipy", "pandas", "sklearn", "fullcp", *sys.stdlib_module_names})
_OPEN = frozenset({"builtins", "types", "argparse", "collections"})  # of the standard library: what just holds things
_IN_CLASSES = (*_NUMBERS, list, tuple, dict, set, frozenset, Tensor, np.ndarray, types.FunctionType)
_BOOKKEEPING = frozenset(vars(nn.Module()))  # what any module has; its parts and hooks are looked at one by one


def identity(value: object) -> str:
    """A hash of all that a loss, a setting or any other object holds."""
    return _Identity(weights=True).of(value)


def identity_of_networks(models: Iterable[nn.Module]) -> str:
    """A hash of what networks are but for the values of their parameters and buffers."""
    return _Identity(weights=False).of(list(models))


def identity_of_weights(models: Iterable[nn.Module]) -> str:
    """A hash of the values of all parameters and buffers."""
    seen = _Identity(weights=True)
    for model in {id(model): unwrap(model) for model in models}.values():
        for tensor in (*model.parameters(), *model.buffers()):
            seen.add(tensor)
    return seen.digest.hexdigest()


class _Identity:
    """A hash that takes in one thing after the other.

    Parameters
    ----------
    weights : whether the values of modules' parameters and buffers count.
    """

    def __init__(self, *, weights: bool):
        self.weights = weights
        self.digest = hashlib.sha256()
        self._seen: dict[int, tuple[int, Any]] = {}  # by address: the place in which it came, and the thing, kept alive

    def of(self, value: object) -> str:
        """The hash with this thing in it."""
        self.add(value)
        return self.digest.hexdigest()

    def add(self, value: Any) -> None:
        """Take in a thing of any kind."""
        if isinstance(value, _PLAIN) and not isinstance(value, Enum):
            self._word(f"{type(value).__qualname__} {value!r}")
        elif isinstance(value, (tuple, types.CodeType)):  # constants: who shares them is up to the compiler
            self._code(value) if isinstance(value, types.CodeType) else self._each(_name(type(value)), value)
        elif id(value) in self._seen:  # the same again, or a circle
            self._word(f"again {self._seen[id(value)][0]}")
        else:
            self._seen[id(value)] = len(self._seen), value
            self._add_new(value)

    def _add_new(self, value: Any) -> None:
        if isinstance(value, Tensor):
            self._tensor(value, values=True)
        elif isinstance(value, np.ndarray):
            self._word(f"array {value.dtype} {value.shape}")
            self.digest.update(np.ascontiguousarray(value).tobytes() if value.dtype != object else b"")
            self._each("entries", value.ravel().tolist() if value.dtype == object else [])
        elif isinstance(value, (list, deque)):
            self._each(type(value).__qualname__, value)
        elif isinstance(value, (set, frozenset)):
            # In no order of its own: that of the hashes of the members, each by itself.
            self._each(type(value).__qualname__, sorted(_Identity(weights=self.weights).of(part) for part in value))
        elif isinstance(value, dict):
            self._each(type(value).__qualname__, [part for pair in value.items() for part in pair])
        elif isinstance(value, nn.Module):
            self._module(unwrap(value))
        elif isinstance(value, (type, types.ModuleType)):
            self._word(f"{type(value).__qualname__} {_name(value)}")
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.MethodType):
            self._each("method", [value.__self__, value.__func__])
        elif isinstance(value, functools.partial):
            self._each("partial", [value.func, value.args, value.keywords])
        else:
            self._object(value)

    def _word(self, word: str) -> None:
        self.digest.update(f"{len(word)}:{word};".encode())

    def _each(self, kind: str, parts: Iterable[Any]) -> None:
        parts = list(parts)
        self._word(f"{kind} {len(parts)}")
        for part in parts:
            self.add(part)

    def _tensor(self, tensor: Tensor, *, values: bool) -> None:
        self._word(f"tensor {tensor.dtype} {tuple(tensor.shape)} {tensor.requires_grad}")
        if values and not tensor.is_meta:
            dense = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
            flat = dense.cpu().resolve_conj().contiguous().flatten()
            self.digest.update(flat.view(torch.uint8).numpy().tobytes())

    def _module(self, module: nn.Module) -> None:
        self._type(type(module))
        tensors = {**module._parameters, **module._buffers}
        self._word(f"tensors {list(tensors)}")
        for tensor in tensors.values():
            if isinstance(tensor, Tensor):
                self._tensor(tensor, values=self.weights)
        hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]  # their keys count up
        own = {name: value for name, value in vars(module).items() if name not in _BOOKKEEPING}
        for part in (module._modules, hooks, own):
            self.add(part)

    def _object(self, value: Any) -> None:
        """A thing of some class: what it holds, and how its class is written unless that is a library's."""
        self._type(type(value))
        self._word(_name(value) if callable(value) and hasattr(value, "__name__") else "")
        library = _library(type(value))
        if library in sys.stdlib_module_names and library not in _OPEN:
            return  # a logger, a lock: they know the whole process
        slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        self.add({name: getattr(value, name) for name in slots if isinstance(name, str) and hasattr(value, name)})
        self.add(dict(getattr(value, "__dict__", {})))

    def _type(self, kind: type) -> None:
        self._word(_name(kind))
        for base in kind.__mro__:
            if not _is_of_a_library(base):
                parts = {name: part for name, part in vars(base).items() if not name.startswith("__")}
                parts |= {name: part for name, part in vars(base).items() if isinstance(part, types.FunctionType)}
                for name, part in parts.items():
                    self._word(name)
                    for inner in (getattr(part, "__func__", None), getattr(part, "fget", None), part):
                        if isinstance(inner, _IN_CLASSES):
                            self.add(inner)

    def _function(self, function: types.FunctionType) -> None:
        self._word(f"function {_name(function)}")
        if _is_of_a_library(function):
            return
        self.add(function.__code__)
        self._each("defaults", [function.__defaults__, function.__kwdefaults__])
        self._each("closure", [_content(cell) for cell in function.__closure__ or ()])
        # The globals that the code names: a constant, a helper. Classes and libraries come by their names.
        found = {name: function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__}
        self.add(found)

    def _code(self, code: types.CodeType) -> None:
        self.digest.update(code.co_code)
        self._each("names", [*code.co_names, *code.co_varnames, *code.co_freevars])
        self._each("constants", code.co_consts)


def _names(code: types.CodeType) -> list[str]:
    """The globals of a function and of the functions inside of it."""
    own = [step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    inner = [name for part in code.co_consts if isinstance(part, types.CodeType) for name in _names(part)]
    return list(dict.fromkeys([*own, *inner]))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', getattr(value, '__name__', ''))}"


def _library(value: Any) -> str:
    """The package that a class or function is of."""
    return (getattr(value, "__module__", None) or "builtins").split(".")[0]


def _is_of_a_library(value: Any) -> bool:
    return _library(value) in _LIBRARIES
