"""KFAC, last-layer and diagonal curvature beyond the contract: factors, networks of all kinds, refusals, spectra."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import fullcp
from cases import NETWORKS, Doubled, Summed, Tied, build
from fullcp.curvature import fit_curvature, jacobian_for, last_layer_gram, spectrum
from fullcp.curvature.kfac import kfac_blocks
from fullcp.features import FeatureRows, Jacobian
from fullcp.features.penultimate import is_last_layer
from reference import dense_jacobian, dense_kfac


def mlp(outputs=2):
    return nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.Linear(5, 4, bias=False), nn.Tanh(), nn.Linear(4, outputs))


def convolutions(**settings):
    first = nn.Conv2d(2, 3, 3, **settings)
    width = first(torch.zeros(1, 2, 7, 6)).shape[1:].numel()
    return nn.Sequential(first, nn.Tanh(), nn.Flatten(), nn.Linear(width, 2))


CHAINS = {
    "mlp": (lambda: mlp(), (3,)),
    "one output": (lambda: mlp(1), (3,)),
    "positions": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Flatten(), nn.Linear(20, 2)), (5, 3)),
    "convolution": (convolutions, (2, 7, 6)),
    "convolution, stride": (lambda: convolutions(stride=(2, 1)), (2, 7, 6)),
    "convolution, padding": (lambda: convolutions(padding=(1, 2)), (2, 7, 6)),
    "convolution, all": (lambda: convolutions(stride=2, padding=2, dilation=(2, 1), bias=False), (2, 7, 6)),
}


class Last(nn.Module):
    """A recurrent layer, and a linear one on what it gives last."""

    def __init__(self, layer, head):
        super().__init__()
        self.layer, self.head = layer, head

    def forward(self, x):
        return self.head(self.layer(x)[0][:, -1])


class Renamed(nn.Linear):
    """A linear layer under another name."""


class Adapted(nn.Linear):
    """Something is added to what it gives, as adapters do."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.low = nn.Parameter(torch.randn(sizes[0]))

    def forward(self, x):
        return super().forward(x) + torch.tanh(x @ self.low).unsqueeze(-1)


class Rounded(nn.Module):
    """A network that runs under autocast by itself."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.network(x)


def chain(name, rows=9, seed=0):
    torch.manual_seed(seed)
    make, shape = CHAINS[name]
    return make().double(), torch.randn(rows, *shape, dtype=torch.float64)


def rows_of(model, X, structure="full", memory=10**8):
    return FeatureRows(jacobian_for(structure, model, X), X, memory=memory)


def dense(block):
    """The matrix of a block, by turning its eigenvectors one by one."""
    Q = block.turn_back(torch.eye(block.eigenvalues.numel(), dtype=torch.float64))
    return Q.T @ block.eigenvalues.flatten().diag() @ Q


def assert_blocks(model, X, expected, memory=10**8):
    found = kfac_blocks(rows_of(model, X, memory=memory))
    for block, (name, S) in zip(found, expected.items(), strict=True):
        torch.testing.assert_close(dense(block), S, rtol=1e-9, atol=1e-9 * float(S.abs().max()), msg=name)


@pytest.mark.parametrize("name", CHAINS)
def test_factors_equal_loops_over_rows(name):
    model, X = chain(name)
    assert_blocks(model, X, dense_kfac(model, X))


@pytest.mark.parametrize("name", CHAINS)
def test_bias_blocks_and_single_linear_layers_are_exact(name):
    model, X = chain(name)
    flat = dense_jacobian(model, X)[1].flatten(0, 1)
    S, start = flat.T @ flat, 0
    for block, (parameter, p) in zip(kfac_blocks(rows_of(model, X)), model.named_parameters()):
        own = slice(start, start := start + p.numel())
        if "bias" in parameter:
            torch.testing.assert_close(dense(block), S[own, own], rtol=1e-9, atol=1e-10)


def test_one_layer_with_one_output_is_the_full_curvature():
    X = torch.randn(20, 4, dtype=torch.float64)
    model = nn.Linear(4, 1, bias=False).double()
    features = rows_of(model, X)
    phi = features.jacobian(torch.randn(5, 4, dtype=torch.float64))[1]
    left, right = (fit_curvature(features, word, 0.3) for word in ("kfac", "full"))
    torch.testing.assert_close(left.leverage(phi), right.leverage(phi))
    torch.testing.assert_close(left.slack(), right.slack())


@pytest.mark.parametrize("name", ["mlp", "one output", "convolution", "convolution, all"])
def test_factors_equal_curvlinops(name):
    curvlinops = pytest.importorskip("curvlinops", reason="needs curvlinops-for-pytorch, which fullcp[dev] installs")
    model, X = chain(name)
    loss = nn.MSELoss(reduction="sum")  # whose Gauss-Newton matrix is 2 S
    operator = curvlinops.KFACLinearOperator(
        model, loss, list(model.parameters()), [(X, model(X).detach())], fisher_type="type-2", kfac_approx="expand"
    )
    S = operator @ torch.eye(operator.shape[1], dtype=torch.float64) / 2
    start = 0
    for block, (parameter, p) in zip(kfac_blocks(rows_of(model, X)), model.named_parameters()):
        own = slice(start, start := start + p.numel())
        if parameter.endswith("weight") or name in {"mlp", "one output"}:  # of convolutions, ours are the exact ones
            torch.testing.assert_close(dense(block), S[own, own], rtol=1e-8, atol=1e-10)


def test_chunks_are_immaterial():
    model, X = chain("convolution", rows=60)
    assert_blocks(model, X, dense_kfac(model, X), memory=10**5)


@pytest.mark.parametrize("padding_mode", ["zeros", "reflect", "circular"])
@pytest.mark.parametrize("padding", ["same", 1])
def test_other_paddings(padding, padding_mode):
    """One convolution at one position a row, summed: its blocks are exact."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 1, 3, padding=padding, padding_mode=padding_mode), nn.Flatten()).double()
    X = torch.randn(8, 1, 3, 3, dtype=torch.float64)
    phi = dense_jacobian(model, X)[1]  # (8, 9, 10): each output is one position
    weight, bias = kfac_blocks(rows_of(model, X))
    S = torch.einsum("nod,noe->de", phi, phi)
    torch.testing.assert_close(dense(weight), S[:9, :9])
    torch.testing.assert_close(dense(bias), S[9:, 9:])


@pytest.mark.parametrize("name", [name for name in NETWORKS if name != "tied"])
def test_any_network(name):
    """Tensors outside of Linear and Conv2d layers have their exact blocks; the rest is finite and positive."""
    model, X = build(name)
    model.eval()
    features = rows_of(model, X)
    flat = dense_jacobian(model, X)[1].flatten(0, 1)
    S, start = flat.T @ flat, 0
    kinds = {
        f"{n}.{p}" if n else p: type(m) for n, m in model.named_modules() for p, _ in m.named_parameters(recurse=False)
    }
    for block, (parameter, p) in zip(kfac_blocks(features), model.named_parameters()):
        own = slice(start, start := start + p.numel())
        if kinds[parameter] not in (nn.Linear, nn.Conv2d):
            torch.testing.assert_close(dense(block), S[own, own], rtol=1e-8, atol=1e-10)
    V = fit_curvature(features, "kfac", 0.1).leverage(features.jacobian(X)[1])
    assert torch.isfinite(V).all()


@pytest.mark.parametrize("kind", [Renamed, Doubled, Summed, Adapted])
def test_classes_derived_from_linear(kind):
    """Each tensor has KFAC's block where its layer explains its gradients, and else the exact one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), kind(4, 2)).double()
    X = torch.randn(9, 3, dtype=torch.float64)
    flat = dense_jacobian(model, X)[1].flatten(0, 1)
    S, start = flat.T @ flat, 0
    blocks = {}
    for block, (name, p) in zip(kfac_blocks(rows_of(model, X)), model.named_parameters(), strict=True):
        blocks[name] = dense(block), S[start : start + p.numel(), start : start + p.numel()]
        start += p.numel()
    for name, (found, exact) in blocks.items():
        layer = name.startswith("0") or kind in (Renamed, Adapted)
        if "bias" in name or "low" in name or not layer:
            torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-10, msg=name)
    if kind is Renamed:
        plain = nn.Sequential(*model[:2], nn.Linear(4, 2)).double()
        plain.load_state_dict(model.state_dict())
        assert_blocks(model, X, dense_kfac(plain, X))


def test_a_large_layer_of_its_own_kind_is_named():
    model = nn.Sequential(nn.Linear(3, 60), nn.Tanh(), Doubled(60, 50), nn.Tanh(), nn.Linear(50, 1)).double()
    message = r"2\.weight belongs to a Doubled that uses it in a way of its own"
    with pytest.raises(ValueError, match=message):
        fit_curvature(rows_of(model, torch.randn(9, 3).double()), "kfac", 1.0)


@pytest.mark.parametrize(
    ("network", "shape"),
    [
        (lambda: nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 1)), (8,)),
        (lambda: nn.Sequential(nn.Conv2d(2, 40, 2), nn.Tanh(), nn.Flatten(), nn.Linear(40 * 4, 1)), (2, 3, 3)),
    ],
)
def test_autocast_inside_of_the_network(network, shape):
    torch.manual_seed(0)
    plain, X = network(), torch.randn(60, *shape)
    found, expected = (fit_curvature(rows_of(model, X), "kfac", 1.0) for model in (Rounded(plain), plain))
    torch.testing.assert_close(found.slack(), expected.slack(), rtol=0.02, atol=0.02)


class TestRefusals:
    X = torch.randn(12, 4, dtype=torch.float64)

    def test_a_weight_in_two_places(self):
        with pytest.raises(
            ValueError, match=r"a\.weight is used in more than one place .* curvature='full', 'low_rank'"
        ):
            fit_curvature(rows_of(Tied().double(), self.X), "kfac", 1.0)

    def test_a_layer_used_twice(self):
        layer = nn.Linear(4, 4)
        model = nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(4, 1)).double()
        with pytest.raises(ValueError, match=r"0\.weight is used in more than one place"):
            fit_curvature(rows_of(model, self.X), "kfac", 1.0)

    def test_a_weight_used_past_its_layer(self):
        class Past(nn.Module):
            def __init__(self):
                super().__init__()
                self.a = nn.Linear(4, 1)

            def forward(self, x):
                return self.a(x) + torch.tanh(x) @ self.a.weight.T

        with pytest.raises(ValueError, match=r"gradients of a\.weight are not those that its layer explains"):
            fit_curvature(rows_of(Past().double(), self.X), "kfac", 1.0)

    @pytest.mark.parametrize(
        ("kind", "name", "owner"),
        [
            (lambda: nn.Sequential(nn.Embedding(600, 4), nn.Flatten(), nn.Linear(8, 1)), "0.weight", "Embedding"),
            (lambda: Last(nn.LSTM(4, 30, batch_first=True), nn.Linear(30, 1)), "layer.weight_hh_l0", "LSTM"),
            (lambda: nn.Sequential(nn.Conv1d(2, 300, 4), nn.Flatten(), nn.Linear(300, 1)), "0.weight", "Conv1d"),
            (
                lambda: nn.Sequential(
                    nn.Unflatten(2, (2, 2)), nn.Conv2d(3, 999, 2, groups=3), nn.Flatten(), nn.Linear(999, 1)
                ),
                "1.weight",
                "Conv2d of 3 groups",
            ),
        ],
    )
    def test_large_tensors_of_other_kinds(self, kind, name, owner):
        X = torch.randint(600, (9, 2)) if owner == "Embedding" else torch.randn(9, 3 if "groups" in owner else 2, 4)
        message = rf"{re.escape(name)} belongs to a .*{owner}, .* entries .* 'low_rank', .* requires_grad away"
        with pytest.raises(ValueError, match=message):
            fit_curvature(rows_of(kind(), X), "kfac", 1.0)

    @pytest.mark.parametrize("tune", [False, True])
    def test_factors_that_the_machine_cannot_hold(self, tune):
        """A would have 10^12 entries; found before anything of the kind is asked for."""
        features = rows_of(nn.Linear(10**6, 1), torch.randn(3, 10**6))
        message = (
            r"curvature='kfac' needs 32000\.0 GB for factors of up to 1000000 x 1000000 numbers, cpu has .*low_rank"
        )
        with pytest.raises(MemoryError, match=message):
            spectrum(features, "kfac") if tune else fit_curvature(features, "kfac", 1.0)

    def test_l2_that_varies_within_a_tensor(self):
        model = nn.Linear(4, 1).double()
        with pytest.raises(ValueError, match=r"l2 varies within weight, from 1 to 4: .* one value a parameter tensor"):
            fit_curvature(rows_of(model, self.X), "kfac", [1.0, 2.0, 3.0, 4.0, 1.0])
        fit_curvature(rows_of(model, self.X), "diagonal", [1.0, 2.0, 3.0, 4.0, 1.0])

    @pytest.mark.parametrize("structure", ["kfac", "diagonal"])
    def test_what_no_row_determines(self, structure):
        model, X = nn.Linear(4, 1).double(), self.X.clone()
        X[:, 1] = 0
        with pytest.raises(fullcp.NotPositiveDefiniteError, match="singular in float64 in parameter weight: l2 = 0"):
            fit_curvature(rows_of(model, X), structure, 0.0)
        fit_curvature(rows_of(model, self.X), structure, 0.0)


class TestLastLayer:
    @pytest.mark.parametrize("form", ["primal", "dual"])
    @pytest.mark.parametrize("outputs", [1, 3])
    @pytest.mark.parametrize("bias", [True, False])
    def test_is_the_full_curvature_of_these_parameters(self, form, outputs, bias):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, outputs, bias=bias)).double()
        X = torch.randn(20 if form == "primal" else 4, 3, dtype=torch.float64)
        features = rows_of(model, X, "last_layer")
        assert list(features.jacobian.parameters) == ["2.weight", "2.bias"][: 1 + bias]
        l2 = [0.3, 0.7][: 1 + bias]
        found, expected = (fit_curvature(features, word, l2) for word in ("last_layer", "full"))
        assert found.name == f"last layer, {form}"
        phi = features.jacobian(torch.randn(5, 3, dtype=torch.float64))[1]
        for left, right in ((found.query(phi), expected.query(phi)),):
            torch.testing.assert_close(left.leverage, right.leverage)
            torch.testing.assert_close(left.cross(slice(1, 3)), right.cross(slice(1, 3)))
        torch.testing.assert_close(found.slack(), expected.slack())

    def test_gram_before_l2(self):
        model, X = mlp(3).double(), torch.randn(20, 3, dtype=torch.float64)
        features = rows_of(model, X, "last_layer")
        S, copies = last_layer_gram(features)
        z = torch.cat([model[:-1](X), torch.ones(20, 1).double()], 1).detach()
        torch.testing.assert_close(S, z.T @ z)
        assert copies == 3
        assert fit_curvature(features, "last_layer", 1.0).name == "last layer, primal"

    def test_no_gradients_of_whole_rows_are_held(self):
        """1,000 rows of 4 outputs and 4 x 500 weights: phi would take 64 MB, z takes 2 MB."""
        model, X = nn.Linear(500, 4), torch.randn(1000, 500)
        curvature = fit_curvature(rows_of(model, X, "last_layer", memory=8 * 10**6), "last_layer", 1.0)
        assert curvature.slack().shape == (1000, 4, 4)
        assert curvature.single.features.holds

    def test_refusals(self):
        X = torch.randn(12, 4)
        scaled = nn.Sequential(nn.Linear(4, 2), nn.Softplus())
        with pytest.raises(ValueError, match=r"a network that ends in an nn.Linear layer"):
            jacobian_for("last_layer", scaled, X)
        frozen = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        frozen[1].requires_grad_(False)
        with pytest.raises(ValueError, match="parameters of the last layer that have requires_grad"):
            jacobian_for("last_layer", frozen, X)
        layer = nn.Linear(4, 4)
        with pytest.raises(ValueError, match="a last layer that is used once"):
            jacobian_for("last_layer", nn.Sequential(layer, nn.Tanh(), layer), X)
        features = rows_of(nn.Linear(4, 2), X, "last_layer")
        with pytest.raises(ValueError, match="l2 must be the same for all outputs"):
            fit_curvature(features, "last_layer", torch.arange(1.0, 11.0))
        with pytest.raises(ValueError, match="the last layer's parameters alone"):
            fit_curvature(rows_of(mlp(), torch.randn(9, 3)), "last_layer", 1.0)

    def test_classes_derived_from_linear(self):
        """Where z and 1 are its gradients, exactly what nn.Linear has; elsewhere it is found out, named or not."""
        X, y = torch.randn(40, 3, dtype=torch.float64), torch.randn(40, dtype=torch.float64)
        body = nn.Sequential(nn.Linear(3, 6), nn.Tanh()).double()
        plain, renamed, doubled = (nn.Sequential(body, kind(6, 1)).double() for kind in (nn.Linear, Renamed, Doubled))
        for model in (renamed, doubled):
            model[1].load_state_dict(plain[1].state_dict())
        assert is_last_layer(Jacobian(renamed, X, only=["1.weight", "1.bias"]), X)
        left, right = (fit_curvature(rows_of(m, X, "last_layer"), "last_layer", 0.3) for m in (renamed, plain))
        torch.testing.assert_close(left.slack(), right.slack())
        for model in (doubled, nn.Sequential(body, nn.utils.parametrizations.weight_norm(nn.Linear(6, 1).double()))):
            with pytest.raises(ValueError, match=r"does something of its own with 1\..*name the layer"):
                jacobian_for("last_layer", model, X)
            named = fullcp.FullConformalRegressor(model, "last_layer", l2=0.3, parameters="1").conformalize(X, y)
            exact = fullcp.FullConformalRegressor(model, "full", l2=0.3, parameters="1").conformalize(X, y)
            assert named.curvature_.name == "full, primal"
            torch.testing.assert_close(torch.tensor(named.leverages_), torch.tensor(exact.leverages_))

    def test_a_frozen_weight_leaves_the_bias(self):
        model, X = nn.Linear(4, 2), torch.randn(12, 4)
        model.weight.requires_grad_(False)
        curvature = fit_curvature(rows_of(model, X, "last_layer"), "last_layer", 1.0)
        torch.testing.assert_close(curvature.slack(), (1 - torch.eye(2).double() / 13).expand(12, 2, 2) * torch.eye(2))


@pytest.mark.parametrize("name", [*CHAINS, "batch norm", "own parameter", "tokens"])
@pytest.mark.parametrize("memory", [10**8, 10**4])
def test_leverages_without_phi(name, memory):
    """From what layers see as from the gradients themselves."""
    model, X = chain(name) if name in CHAINS else build(name)
    model.eval()
    features = rows_of(model, X, memory=memory)
    l2 = torch.linspace(0.1, 2.0, len(features.jacobian.parameters))
    curvature = fit_curvature(features, "kfac", l2)
    phi = dense_jacobian(model, X)[1]
    expected = torch.eye(features.outputs).double() - curvature.leverage(phi)
    torch.testing.assert_close(curvature.slack(), expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("structure", ["kfac", "diagonal"])
def test_spectrum_comes_before_l2(structure):
    model, X = chain("mlp")
    features = rows_of(model, X)
    eigenvalues, index = spectrum(features, structure)
    S = dense_kfac(model, X)
    flat = dense_jacobian(model, X)[1].flatten(0, 1)
    diagonals = torch.split(flat.square().sum(0), [p.numel() for p in model.parameters()])
    for k, block in enumerate(S.values()):
        expected = torch.linalg.eigvalsh(block) if structure == "kfac" else diagonals[k].sort().values
        torch.testing.assert_close(eigenvalues[index == k].sort().values, expected, rtol=1e-7, atol=1e-9)
    kept = features.kept[structure]
    assert fit_curvature(features, structure, 1.0).blocks is kept
    assert not features.kept


def test_rows_without_finite_gradients_are_named():
    model, X = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)), torch.randn(30, 3)
    X[17, 1] = float("inf")
    with pytest.raises(ValueError, match=r"NaN or infinite .* 17"):
        kfac_blocks(FeatureRows(Jacobian(model, torch.randn(9, 3)), X, memory=10**8))


def test_missing_scores_are_told():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    X, y = torch.randn(40, 3), torch.randn(40)
    with pytest.warns(fullcp.MissingScoreWarning, match=r"% of the training rows .* curvature='diagonal'"):
        fullcp.FullConformalRegressor(model, "diagonal", "studentized", l2=0.1).conformalize(X, y)
