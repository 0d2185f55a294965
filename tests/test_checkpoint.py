"""A file of a training goes on with the run that wrote it, in any process, and with no other."""

from __future__ import annotations

import copy
import functools
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fullcp
from fullcp.training import PinballLoss, Schedule, mlp, replicate, train
from fullcp.training.identity import identity, identity_of_networks, identity_of_weights

F64 = torch.float64
OTHER = "checkpoint holds another run"


def data(rows=20, seed=0):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(rows, 3, generator=generator, dtype=F64)
    return X, X[:, 0] ** 2


def network(activation=nn.GELU):
    return replicate(lambda: mlp(3, (4,), activation=activation).double(), [0])[0]


def frozen(factor):
    model = network()
    model[0].weight.requires_grad_(False).mul_(factor)
    return model


class Scaled(nn.Module):
    """A constant that is no parameter, and a function among the attributes."""

    def __init__(self, factor=1.0, function=torch.tanh, buffer=0.0):
        super().__init__()
        self.inner, self.factor, self.function = network(), factor, function
        self.register_buffer("shift", torch.tensor(buffer, dtype=F64), persistent=False)

    def forward(self, x):
        return self.factor * self.function(self.inner(x)) + self.shift


class Weighted:
    """A loss whose default repr shows its address."""

    same_shape = True

    def __init__(self, weight):
        self.weight = weight

    def __call__(self, f, y):
        return self.gradient(f, y)[0]

    def gradient(self, f, y):
        return self.weight * (f - y).square().sum(-1), 2 * self.weight * (f - y)


def closure(k):
    return lambda f, y: (k * (f - y) ** 2).sum(-1)


def power(f, y, p):
    return (f - y).abs().pow(p).sum(-1)


def hooked():
    model = network()
    model[0].register_forward_hook(lambda module, inputs, output: 2 * output)
    return model


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, {"model": network(nn.ReLU)}),
        ({"model": network(lambda: nn.LeakyReLU(0.1))}, {"model": network(lambda: nn.LeakyReLU(0.9))}),
        ({}, {"model": hooked()}),
        ({"model": Scaled()}, {"model": Scaled(factor=2.0)}),
        ({"model": Scaled()}, {"model": Scaled(function=torch.sigmoid)}),
        ({"loss": closure(1.0)}, {"loss": closure(100.0)}),
        ({"loss": closure(torch.ones(1))}, {"loss": closure(2 * torch.ones(1))}),
        ({"loss": functools.partial(power, p=2)}, {"loss": functools.partial(power, p=3)}),
        ({"loss": lambda f, y: (f - y).abs().sum(-1)}, {"loss": lambda f, y: (f - y).square().sum(-1)}),
        ({"loss": lambda f, y, k=1.0: k * (f - y).sum(-1)}, {"loss": lambda f, y, k=2.0: k * (f - y).sum(-1)}),
        ({"loss": Weighted(1.0)}, {"loss": Weighted(2.0)}),
        ({"loss": PinballLoss([0.4])}, {"loss": PinballLoss([0.6])}),
        ({"validation": data(9)}, {"validation": data(9, seed=1)}),
        ({"validation": data(9)}, {}),
        ({"l2": "marglik", "epochs": 100}, {"epochs": 100}),
        ({"l2": "marglik", "epochs": 100}, {"l2": "marglik", "epochs": 100, "tuning": Schedule(burn_in=99)}),
    ],
)  # fmt: skip
def test_a_file_serves_no_other_run(tmp_path, first, second):
    for changes in (first, second):
        arguments = {"model": network(), "epochs": 3, "checkpoint": tmp_path / "run", **changes}
        model = copy.deepcopy(arguments.pop("model"))
        before = identity_of_weights([model])
        if changes is second:
            with pytest.raises(ValueError, match=OTHER):
                train(model, *data(), **arguments)
            assert identity_of_weights([model]) == before
        else:
            train(model, *data(), **arguments)


@pytest.mark.parametrize(("first", "second"), [(frozen(1.0), frozen(10.0)), (Scaled(buffer=0.0), Scaled(buffer=1.0))])
def test_what_does_not_train_counts_too(tmp_path, first, second):
    train(first, *data(), epochs=3, checkpoint=tmp_path / "run")
    with pytest.raises(ValueError, match="began with other weights"):
        train(second, *data(), epochs=3, checkpoint=tmp_path / "run")


def test_a_trained_network_is_told_from_an_untrained_one(tmp_path):
    model, again = network(), network()
    run = train(model, *data(), epochs=3, checkpoint=tmp_path / "run")
    with pytest.raises(ValueError, match="Run the same call on the untrained network, or delete the file"):
        train(model, *data(), epochs=3, checkpoint=tmp_path / "run")
    assert train(again, *data(), epochs=3, checkpoint=tmp_path / "run").losses == run.losses
    assert identity_of_weights([again]) == identity_of_weights([model])


SCRIPT = """
import sys, torch
from fullcp.training import mlp, replicate, train
junk = [object() for _ in range(int(sys.argv[1]))]
scale = 3.0
words = {"north", "south", "east", "west"}

class Own:
    names = frozenset(["a", "b", "c"])
    def __init__(self): self.words, self.helper = set(words), helper
    def gradient(self, f, y): return self(f, y), 2 * scale * (f - y)
    def __call__(self, f, y): return self.helper(f, y).sum(-1) if "a" in {"a", "b", "c"} else None

def helper(f, y): return scale * (f - y).square()

X = torch.linspace(-1, 1, 30).view(10, 3)
for name, loss in (("object", Own()), ("function", lambda f, y: helper(f, y).sum(-1))):
    (model,) = replicate(lambda: mlp(3), [0])
    print(train(model, X, X[:, 0], epochs=int(sys.argv[2]), loss=loss, checkpoint=f"{sys.argv[3]}/{name}").losses)
"""


def test_a_loss_is_known_again_in_another_process(tmp_path):
    """Addresses, and the order in which sets come, differ between processes."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    results = []
    for junk in ("0", "10007"):
        command = [sys.executable, script, junk, "4", tmp_path]
        results.append(subprocess.run(command, capture_output=True, text=True, check=False))
        assert results[-1].returncode == 0, results[-1].stderr
    assert results[0].stdout == results[1].stdout
    script.write_text(SCRIPT.replace("scale = 3.0", "scale = 4.0"))
    other = subprocess.run([sys.executable, script, "0", "4", tmp_path], capture_output=True, text=True, check=False)
    assert OTHER in other.stderr


def test_identities_of_odd_things():
    circle: list[object] = [1]
    circle.append(circle)
    assert identity(circle) == identity(circle)
    assert identity({"a": np.arange(3)}) == identity({"a": np.arange(3)})
    assert identity(np.arange(3)) != identity(np.arange(3.0))
    assert identity([1, 2]) != identity((1, 2))
    assert identity(["ab", "c"]) != identity(["a", "bc"])
    assert identity(np.mean) != identity(np.median)
    assert identity(torch.nn.functional.mse_loss) != identity(torch.nn.functional.l1_loss)
    assert identity(Weighted(1.0).gradient) != identity(Weighted(2.0).gradient)
    assert identity_of_networks([network()]) == identity_of_networks([frozen(1.0).requires_grad_()])
    assert identity_of_networks([network()]) != identity_of_networks([frozen(1.0)])


@pytest.mark.parametrize(
    ("path", "error", "words"), [(3, TypeError, "must be a path"), (".", ValueError, "is a folder")]
)
def test_bad_paths(path, error, words):
    with pytest.raises(error, match=f"checkpoint {words}"):
        train(network(), *data(), epochs=2, checkpoint=path)
    with pytest.raises(error, match=f"checkpoint {words}"):
        fullcp.RetrainedFullConformalRegressor(network(), l2=1.0, checkpoint=path).conformalize(*data())


def loss_class(method="(f - y).square()", constant=1.0, getter="1.0", static="x", unread=0):
    """A class as its text has it."""
    text = f"""
unread, square = {unread}, {unread}
class Loss:
    constants = [{constant}]
    @property
    def factor(self): return {getter}
    @staticmethod
    def changed(x): return {static}
    def __call__(self, f, y): return self.factor * self.constants[0] * self.changed({method}.sum(-1))
"""
    names: dict[str, Any] = {"__name__": "users"}
    exec(text, names)
    return names["Loss"]()


def test_classes_are_known_by_all_that_is_written_in_them():
    plain = identity(loss_class())
    assert identity(loss_class()) == plain
    assert identity(loss_class(unread=1)) == plain  # a global that no code reads, even one named like a method
    for change in ({"method": "(f - y).abs()"}, {"constant": 2.0}, {"getter": "2.0"}, {"static": "2 * x"}):
        assert identity(loss_class(**change)) != plain


def test_retrainings_know_their_network(tmp_path):
    X, y = data()
    recipe = {"l2": 1.0, "candidates": 3, "epochs": 3, "start": "trained", "checkpoint": tmp_path / "known"}
    fullcp.RetrainedFullConformalRegressor(Scaled(), **recipe).conformalize(X, y).predict_interval(X[:2], 0.5)
    fullcp.RetrainedFullConformalRegressor(Scaled(), **recipe).conformalize(X, y)
    for other in (Scaled(factor=2.0), Scaled(function=torch.sigmoid), Scaled(buffer=1.0)):
        with pytest.raises(ValueError, match="checkpoint holds other retrainings"):
            fullcp.RetrainedFullConformalRegressor(other, **recipe).conformalize(X, y)
