"""Per-sample gradients: every way agrees with plain autograd on single rows, and the module is left alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from cases import NETWORKS, Network2d, build
from fullcp.features import FeatureRows, Jacobian
from fullcp.features.gradients import FunctionalGradients, LinearGradients, LoopGradients
from fullcp.features.preserve import preserved
from reference import dense_jacobian


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_equal_plain_autograd(name):
    model, X = build(name)
    f, phi = Jacobian(model, X)(X)
    model.eval()
    f_dense, phi_dense = dense_jacobian(model, X)
    torch.testing.assert_close(f, f_dense)
    torch.testing.assert_close(phi, phi_dense, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", NETWORKS)
def test_expected_way_is_taken(name):
    model, X = build(name)
    expected = NETWORKS[name].way
    assert Jacobian(model, X).way == expected


@pytest.mark.parametrize("name", [name for name, case in NETWORKS.items() if case.way == "linear layers"])
def test_linear_path_agrees_with_torch_func_and_loop(name):
    model, X = build(name)
    parameters = {k: p for k, p in model.named_parameters() if p.requires_grad}
    with preserved(model):
        results = [way(model, parameters)(X) for way in (LinearGradients, FunctionalGradients, LoopGradients)]
    for f, phi in results[1:]:
        torch.testing.assert_close(f, results[0][0], rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(phi, results[0][1], rtol=1e-12, atol=1e-13)


def test_float32_gradients_stay_float32_and_near_the_double_ones():
    model, X = build("mlp")
    f, phi = Jacobian(copy.deepcopy(model).float(), X.float())(X.float())
    assert phi.dtype == f.dtype == torch.float32
    torch.testing.assert_close(phi.double(), dense_jacobian(model, X)[1], rtol=1e-4, atol=1e-5)


class Outside(nn.Module):
    """Uses a layer's weight outside of the layer: hooks do not see it."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 1)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)) + F.linear(x, self.first.weight).square())


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 2)

    def forward(self, x):
        return self.last(self.first(x).tanh_())


class FaintlyOutside(Outside):
    """The same, with gradients that are small beside those of another layer."""

    def forward(self, x):
        return 1e6 * self.last(torch.tanh(self.first(x))) + F.linear(x, self.first.weight).sum(1, keepdim=True)


class Unregistered(nn.Module):
    """Parameters under a second reference of its own: torch.func does not replace these."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 1)
        self.own = [self.first.weight, self.last.weight]

    def forward(self, x):
        return F.linear(torch.tanh(F.linear(x, self.own[0])), self.own[1]) + self.last.bias + self.first.bias.sum()


class Sorts(nn.Module):
    """Sorts its rows on the way in and back on the way out."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 1)

    def forward(self, x):
        order = x[:, 0].argsort()
        return self.last(torch.tanh(self.first(x[order])))[order.argsort()]


@pytest.mark.parametrize(
    ("module", "way"),
    [
        (Outside, "torch.func"),
        (FaintlyOutside, "torch.func"),
        (Unregistered, "a loop over rows"),
        (Sorts, "torch.func"),
        (InPlace, "linear layers"),
    ],
)
@pytest.mark.parametrize("ordered", [False, True])
def test_modules_that_could_fool_the_fast_ways(module, way, ordered):
    torch.manual_seed(0)
    model, X = module().double(), torch.randn(9, 5, dtype=torch.float64)
    jacobian = Jacobian(model, X[X[:, 0].argsort()] if ordered else X)
    assert jacobian.way == way
    torch.testing.assert_close(jacobian(X)[1], dense_jacobian(model, X)[1])


def test_routes_that_the_probe_did_not_take():
    """Experts see some of the rows only: the linear path finds out at run time and leaves it to torch.func."""

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(5, 1), nn.Linear(5, 1)

        def forward(self, x):
            first = x[:, 0] > 0
            if bool(first.all()):
                return self.one(x)
            f = x.new_empty(len(x), 1)
            f[first], f[~first] = self.one(x[first]), self.two(x[~first])
            return f

    torch.manual_seed(0)
    model, X = Experts().double(), torch.randn(9, 5, dtype=torch.float64)
    jacobian = Jacobian(model, X.abs())
    assert jacobian.way == "linear layers"
    torch.testing.assert_close(jacobian(X)[1], dense_jacobian(model, X)[1])


class Gated(nn.Module):
    """A weight used a second time, behind a gate that only some rows open."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 1)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        return self.last(h) + (x[:, :1] > 0) * F.linear(h, self.first.weight[:1])


def test_every_row_of_the_probe_counts():
    torch.manual_seed(0)
    model, X = Gated().double(), torch.randn(40, 5, dtype=torch.float64)
    X[0, 0] = X[-1, 0] = -1.0
    X[8, 0] = 1.0  # one of those probed in between
    jacobian = Jacobian(model, X)
    assert jacobian.way == "torch.func"
    torch.testing.assert_close(jacobian(X)[1], dense_jacobian(model, X)[1])


def test_only_parameters_with_requires_grad_count():
    model, X = build("mlp")
    _, everything = Jacobian(model, X)(X)
    first = sum(p.numel() for p in model[0].parameters())
    for p in model[0].parameters():
        p.requires_grad_(False)
    _, rest = Jacobian(model, X)(X)
    torch.testing.assert_close(rest, everything[:, :, first:])


def snapshot(model):
    return {
        "state": {k: v.clone() for k, v in model.state_dict().items()},
        "modes": [m.training for m in model.modules()],
        "grads": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "requires": [p.requires_grad for p in model.parameters()],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules()],
        "buffers": [id(b) for b in model.buffers()],
    }


class Noisy(nn.Module):
    """Counts its calls in a buffer and draws random numbers it does not use."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.net = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1)).double()

    def forward(self, x):
        self.calls += 1
        torch.rand(3)
        return self.net(x)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("caller", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_module_is_left_as_it_was(training, caller):
    torch.manual_seed(1)
    model = Noisy()
    model.train(training)
    model.net[1].eval()  # a frozen layer, as in fine-tuning
    model.net[0].register_forward_hook(lambda m, i, o: None)
    X = torch.randn(12, 5, dtype=torch.float64)
    before, rng = snapshot(model), torch.get_rng_state()
    with caller():
        jacobian = Jacobian(model, X)
        f, _ = jacobian(X)
        jacobian.predict(X)
    after = snapshot(model)
    assert torch.equal(rng, torch.get_rng_state())
    assert {k: before[k] for k in ("modes", "requires", "hooks", "buffers", "grads")} == {
        k: after[k] for k in ("modes", "requires", "hooks", "buffers", "grads")
    }
    for key, value in before["state"].items():
        assert torch.equal(value, after["state"][key])
    expected = copy.deepcopy(model).eval()(X)
    torch.testing.assert_close(f, expected.detach())  # dropout off, running statistics used


class Remembers(nn.Module):
    """Keeps what it saw, in attributes of its own."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls, self.last = nn.Linear(5, 1), 0, None

    def forward(self, x):
        self.calls += 1
        self.last = self.layer(x)
        self.new = self.last.exp()
        return self.last


def test_attributes_are_as_before():
    model, X = Remembers().double(), torch.randn(9, 5, dtype=torch.float64)
    model(X)
    kept = model.last
    Jacobian(model, X)(X)
    assert model.calls == 1
    assert model.last is kept
    del model.new
    Jacobian(model, X)(X)
    assert not hasattr(model, "new")


class Builds(nn.Module):
    """Makes its last layer when it first sees data."""

    def __init__(self, declared):
        super().__init__()
        self.first = nn.Linear(5, 4)
        if declared:
            self.last = None

    def forward(self, x):
        if getattr(self, "last", None) is None:
            self.last = nn.Linear(4, 1)
        return self.last(torch.tanh(self.first(x)))


@pytest.mark.parametrize("declared", [True, False])
def test_networks_that_build_themselves_are_refused_untouched(declared):
    model, X = Builds(declared), torch.randn(9, 5)
    with pytest.raises(ValueError, match="run it on one batch first"):
        Jacobian(model, X)
    assert getattr(model, "last", None) is None
    assert list(model._modules) == ["first"]
    model(X)
    last = model.last
    f, _ = Jacobian(model, X)(X)
    assert model.last is last
    torch.testing.assert_close(f, model(X).detach())


@pytest.mark.parametrize("make", [torch.jit.script, lambda model: torch.jit.trace(model, torch.randn(3, 5))])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_scripted_modules(make):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.5), nn.Linear(4, 1)).eval()
    X = torch.randn(9, 5)
    model = make(plain)
    model.train()
    _, phi = Jacobian(model, X)(X)
    assert all(module.training for module in model.modules())
    torch.testing.assert_close(phi.double(), dense_jacobian(plain.eval(), X)[1], rtol=1e-4, atol=1e-5)


def test_buffers_come_back_whatever_they_hold():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 1)
            self.register_buffer("seen", torch.full((2,), float("nan")))

        def forward(self, x):
            self.seen.zero_()
            return self.layer(x)

    model, X = Writes(), torch.randn(9, 5)
    Jacobian(model, X)(X)
    assert model.seen.isnan().all()
    quiet = Jacobian(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)), X)
    assert not quiet.facts()["writes"]


def test_layers_that_write_to_their_weights():
    model = nn.Sequential(nn.Embedding(7, 3, max_norm=0.5), nn.Flatten(), nn.Linear(6, 1)).double()
    before = copy.deepcopy(model.state_dict())
    X = torch.randint(0, 7, (9, 2))
    Jacobian(model, X)(X)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_module_is_restored_after_an_error():
    model, X = build("mlp")
    model.train()
    jacobian = Jacobian(model, X)
    with pytest.raises(RuntimeError):
        jacobian(X[:, :2])
    assert model.training
    assert all(len(m._forward_hooks) == 0 for m in model.modules())


class MeanFree(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 1)

    def forward(self, x):
        return self.layer(x - x.mean(0))


class Returns(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.layer, self.wrap = nn.Linear(5, 2), wrap

    def forward(self, x):
        return self.wrap(self.layer(x))


@pytest.mark.parametrize(
    ("model", "error", "words"),
    [
        (MeanFree(), ValueError, "mixes rows"),
        (
            nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 1)),
            ValueError,
            "row",
        ),
        (Returns(lambda f: (f, f)), TypeError, "one tensor, got tuple"),
        (Returns(lambda f: {"y": f}), TypeError, "one tensor, got dict"),
        (Returns(lambda f: f.mean()), ValueError, "one row of numbers an example"),
        (Returns(lambda f: f.unsqueeze(1)), ValueError, "one row of numbers an example"),
        (Returns(lambda f: f.argmax(1, keepdim=True)), TypeError, "floating-point"),
        (Returns(lambda f: F.dropout(f, 0.5)), ValueError, "random outputs"),
        (Returns(lambda f: f * float("nan")), ValueError, "NaN"),
    ],
)
def test_modules_without_rows_are_refused(model, error, words):
    with pytest.raises(error, match=words):
        Jacobian(model, torch.randn(10, 5))


@pytest.mark.parametrize("memory", [10**6, 3 * 10**6, 10**9])
@pytest.mark.parametrize("hold", [True, False])
def test_chunks_cover_all_rows_once(memory, hold):
    model, X = build("mlp")
    X = X.repeat(150, 1)
    features = FeatureRows(Jacobian(model, X), X, memory=memory)
    if hold:
        features.hold()
    for _ in range(2):
        phi = torch.cat([chunk for _, chunk in features.chunks()])
        torch.testing.assert_close(phi, dense_jacobian(model, X)[1], rtol=1e-10, atol=1e-12)
    if memory == 10**6:
        assert len(features.slices()) > 2
        assert not features.holds
    torch.testing.assert_close(features.predictions, dense_jacobian(model, X)[0])


def test_rows_with_infinite_gradients_are_named():
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(1, 1, bias=False)

        def forward(self, x):
            return self.layer(x).clamp(min=0).sqrt()

    model = Root()
    nn.init.ones_(model.layer.weight)
    X = torch.arange(1.0, 41.0).unsqueeze(1)
    X[17] = 0.0  # the square root has no slope there
    features = FeatureRows(Jacobian(model, X), X, memory=10**7)
    with pytest.raises(ValueError, match="row 17"):
        list(features.chunks())


def test_parameters_are_located_by_column():
    model = Network2d()
    jacobian = Jacobian(model, torch.randn(5, 3))
    _, phi = jacobian(torch.randn(2, 3))
    names = [jacobian.locate(j) for j in range(phi.shape[2])]
    assert names[0] == "first.weight[0, 0]"
    assert names[4] == "first.weight[1, 1]"
    assert names[-1] == "last.bias[1]"
    assert len(set(names)) == len(names)
