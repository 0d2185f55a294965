"""The marginal likelihood against its dense formula, finite differences, and direct integration."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fullcp
from fullcp.curvature import jacobian_for
from fullcp.features import FeatureRows, Jacobian
from fullcp.tuning import evidence_of, evidence_of_many, tune
from reference import dense_jacobian, log_marginal_likelihood


def problem(rows, hidden=3, outputs=1, seed=0, memory=10**8):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, hidden), nn.Tanh(), nn.Linear(hidden, outputs)).double()
    X = torch.randn(rows, 3, dtype=torch.float64)
    e = 0.7 * torch.randn(rows, outputs, dtype=torch.float64)
    return model, X, e, FeatureRows(Jacobian(model, X), X, memory=memory)


def dense(model, X, e, precision, variance):
    """The formula with slogdet and a quadratic form, on plain autograd gradients."""
    parameters = list(model.parameters())
    phi = dense_jacobian(model, X)[1].flatten(0, 1)
    d = torch.cat([value * torch.ones(p.numel(), dtype=torch.float64) for p, value in zip(parameters, precision)])
    theta = torch.cat([p.detach().flatten() for p in parameters])
    return log_marginal_likelihood(phi, e.flatten(), theta, d, torch.tensor(variance, dtype=torch.float64)).item()


def at(log_precision, variance):
    """Arguments of the evidence of one network."""
    return torch.as_tensor(log_precision, dtype=torch.float64).reshape(1, -1), torch.tensor([variance]).double().log()


def check_gradient(evidence, log_precision, log_variance):
    """In each argument, against differences of the value."""
    found, step = evidence(log_precision, log_variance), 1e-5
    torch.testing.assert_close(evidence.value(log_precision, log_variance), found.value)
    for g in range(evidence.groups):
        shift = torch.zeros(evidence.groups, dtype=torch.float64)
        shift[g] = step
        up, down = (evidence(log_precision + sign * shift, log_variance).value for sign in (1, -1))
        torch.testing.assert_close(found.in_log_precision[:, g], (up - down) / (2 * step), rtol=1e-5, atol=1e-5)
    up, down = (evidence(log_precision, log_variance + sign * step).value for sign in (1, -1))
    torch.testing.assert_close(found.in_log_variance, (up - down) / (2 * step), rtol=1e-5, atol=1e-5)


@settings(max_examples=60)
@given(
    rows=st.integers(2, 40),
    hidden=st.integers(1, 5),
    outputs=st.integers(1, 2),
    structure=st.sampled_from(["layer", "scalar"]),
    seed=st.integers(0, 10**6),
)
def test_value_is_the_dense_formula_and_gradient_its_differences(rows, hidden, outputs, structure, seed):
    model, X, e, features = problem(rows, hidden, outputs, seed)
    evidence = evidence_of(features, e, structure)
    rng = np.random.default_rng(seed)
    log_precision, log_variance = at(rng.uniform(-3, 3, evidence.groups), np.exp(rng.uniform(-3, 2)))
    precision = log_precision[0].exp().expand(4)
    expected = dense(model, X, e, precision, log_variance.exp().item())
    assert evidence(log_precision, log_variance).value.item() == pytest.approx(expected, rel=1e-9, abs=1e-8)
    check_gradient(evidence, log_precision, log_variance)


def many(rows, hidden, outputs, seed, networks=3, dtype=torch.float64):
    """Networks with rows of their own, some of which the others do not have, and what `evidence_of_many` takes."""
    models, phis, es = [], [], []
    torch.manual_seed(seed)
    X = torch.randn(rows, 3, dtype=torch.float64)
    there = torch.rand(networks, rows) < 0.8
    there[:, 0] = True
    for b in range(networks):
        model = nn.Sequential(nn.Linear(3, hidden), nn.Tanh(), nn.Linear(hidden, outputs)).double()
        phis.append(dense_jacobian(model, X)[1] * there[b, :, None, None])
        es.append(0.7 * torch.randn(rows, outputs, dtype=torch.float64) * there[b, :, None])
        models.append(model)
    phi, e = torch.stack(phis).to(dtype), torch.stack(es).to(dtype)
    theta = torch.stack([torch.cat([p.detach().flatten() for p in model.parameters()]) for model in models]).to(dtype)
    sizes = [p.numel() for p in models[0].parameters()]
    return models, X, there, e, phi, theta, sizes, outputs * there.sum(1)


def in_chunks(phi, e, length=7):
    return zip(torch.split(phi, length, 1), torch.split(e, length, 1))


@settings(max_examples=40)
@given(
    rows=st.integers(2, 30),
    hidden=st.integers(1, 5),
    outputs=st.integers(1, 2),
    structure=st.sampled_from(["layer", "scalar"]),
    form=st.sampled_from(["primal", "dual", None]),
    seed=st.integers(0, 10**6),
)
def test_many_networks_have_each_their_dense_formula(rows, hidden, outputs, structure, form, seed):
    models, X, there, e, phi, theta, sizes, observations = many(rows, hidden, outputs, seed)
    evidence = evidence_of_many(in_chunks(phi, e), theta, sizes, observations, structure=structure, form=form)
    log_precision = torch.empty(3, evidence.groups, dtype=torch.float64).uniform_(-3, 3)
    log_variance = torch.empty(3, dtype=torch.float64).uniform_(-3, 2)
    found = evidence(log_precision, log_variance)
    for b, model in enumerate(models):
        precision = log_precision[b].exp().expand(4)
        expected = dense(model, X[there[b]], e[b, there[b]], precision, log_variance[b].exp().item())
        assert found.value[b].item() == pytest.approx(expected, rel=1e-9, abs=1e-8)
    check_gradient(evidence, log_precision, log_variance)


@pytest.mark.parametrize("structure", ["layer", "scalar"])
@pytest.mark.parametrize("rows", [6, 40])
def test_primal_and_dual_are_the_same_and_sums_are_in_float64(rows, structure):
    *_, e, phi, theta, sizes, observations = many(rows, 4, 2, 0, dtype=torch.float32)
    log_precision = torch.full((3, 4 if structure == "layer" else 1), -1.0, dtype=torch.float64)
    log_variance = torch.full((3,), -3.0, dtype=torch.float64)
    values = []
    for form in ("primal", "dual"):
        evidence = evidence_of_many(in_chunks(phi, e), theta, sizes, observations, structure=structure, form=form)
        values.append(evidence(log_precision, log_variance))
    torch.testing.assert_close(values[0].value, values[1].value, rtol=1e-11, atol=1e-10)
    torch.testing.assert_close(values[0].in_log_precision, values[1].in_log_precision, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(values[0].in_log_variance, values[1].in_log_variance, rtol=1e-8, atol=1e-9)


def test_it_is_the_marginal_likelihood_of_a_linear_model():
    """For a linear network at the maximum of its posterior, y is Gaussian with covariance v I + phi diag(1/d) phi^T."""
    torch.manual_seed(0)
    X = torch.randn(15, 3, dtype=torch.float64)
    y = torch.randn(15, 1, dtype=torch.float64)
    d, v = 2.0, 0.5
    model = nn.Linear(3, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.linalg.solve(X.T @ X / v + d * torch.eye(3), X.T @ y / v).T)
    features = FeatureRows(Jacobian(model, X), X, memory=10**8)
    found = evidence_of(features, (y - model(X)).detach())(*at(np.log(d), v))
    covariance = v * torch.eye(15).double() + X @ X.T / d
    exact = torch.distributions.MultivariateNormal(torch.zeros(15).double(), covariance).log_prob(y[:, 0])
    assert found.value.item() == pytest.approx(exact.item(), rel=1e-10)


@pytest.mark.parametrize(("rows", "hidden"), [(60, 3), (12, 6)])
@pytest.mark.parametrize("structure", ["layer", "scalar"])
def test_tuning_finds_the_maximum(rows, hidden, structure):
    model, X, e, features = problem(rows, hidden)
    found = tune(features, e, structure=structure)
    evidence = evidence_of(features, e, structure)
    log_precision, log_variance = at(np.log(found.l2 / found.noise**2), found.noise**2)
    there = evidence(log_precision, log_variance)
    assert there.value.item() == pytest.approx(found.log_marginal_likelihood, rel=1e-9)
    inside = log_precision.abs() < 15.9
    assert there.in_log_precision[inside].abs().max() < 0.02
    assert there.in_log_variance.abs() < 0.02
    rng = np.random.default_rng(0)
    for _ in range(50):
        shift = torch.from_numpy(rng.normal(size=(1, evidence.groups)))
        assert evidence(log_precision + shift, log_variance + rng.normal()).value <= there.value + 1e-4


def test_noise_and_weights_of_a_known_model_are_found():
    torch.manual_seed(0)
    X = torch.randn(3000, 40, dtype=torch.float64)
    theta = torch.randn(40, dtype=torch.float64) / 2.0  # prior precision 4
    y = X @ theta + 0.3 * torch.randn(3000, dtype=torch.float64)
    model = nn.Linear(40, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.linalg.lstsq(X, y.unsqueeze(1)).solution.T)
    features = FeatureRows(Jacobian(model, X), X, memory=10**9)
    found = tune(features, y.unsqueeze(1) - model(X).detach())
    assert found.noise == pytest.approx(0.3, rel=0.05)
    assert found.l2.item() == pytest.approx(0.09 * 4.0, rel=0.5)


def test_large_kernels_fall_back_to_one_l2():
    *_, e, features = problem(12, 6, memory=5000)
    assert tune(features, e).structure == "scalar"
    *_, e, features = problem(12, 6)
    assert tune(features, e).structure == "layer"


@pytest.mark.parametrize("precision", [[2.0], [0.3, 1.0, 2.0, 5.0]], ids=["scalar", "layer"])
def test_same_number_as_laplace_torch(precision):
    laplace = pytest.importorskip("laplace", reason="laplace-torch does not install beside the CPU build")
    model, X, e, features = problem(30)
    y = model(X).detach() + e
    oracle = laplace.Laplace(model, "regression", subset_of_weights="all", hessian_structure="full", sigma_noise=0.8)
    oracle.fit(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, y), batch_size=30))
    expected = oracle.log_marginal_likelihood(torch.tensor(precision)).item()
    evidence = evidence_of(features, e, "layer" if len(precision) > 1 else "scalar")
    assert evidence(*at(np.log(precision), 0.64)).value.item() == pytest.approx(expected, rel=1e-6)


class TestPredictors:
    """l2="marglik" is the tuned l2, everywhere."""

    def make(self, kind, l2, **arguments):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        return kind(model, l2=l2, **arguments)

    def give(self, cp, X, y):
        if isinstance(cp, fullcp.LaplaceRegressor):
            return cp.fit(X, y)
        if isinstance(cp, fullcp.NormalizedSplitConformalRegressor):
            return cp.fit(X[:50], y[:50]).conformalize(X[50:], y[50:])
        return cp.conformalize(X, y)

    @pytest.mark.parametrize("rows", [80, 65])
    @pytest.mark.parametrize(
        "kind",
        [
            fullcp.FullConformalRegressor,
            fullcp.RefinedSplitConformalRegressor,
            fullcp.NormalizedSplitConformalRegressor,
            fullcp.LaplaceRegressor,
        ],
    )
    def test_tuned_l2_is_used_and_saved(self, kind, rows, tmp_path):
        torch.manual_seed(1)
        X = torch.randn(rows, 3, dtype=torch.float64)
        y = X[:, 0] + 0.5 * torch.randn(rows, dtype=torch.float64)
        cp = self.give(self.make(kind, "marglik"), X, y)
        arguments = {"noise": cp.tuning_.noise} if kind is fullcp.LaplaceRegressor else {}
        plain = self.give(self.make(kind, cp.tuning_.l2, **arguments), X, y)
        assert plain.tuning_ is None
        assert len(cp.tuning_.l2) == 4
        expected = plain.predict_interval(X, 0.8).intervals
        torch.testing.assert_close(cp.predict_interval(X, 0.8).intervals, expected)
        cp.save(tmp_path / "cp")
        loaded = kind.load(tmp_path / "cp", cp.model)
        assert loaded.l2 == "marglik"
        assert loaded.tuning_.noise == cp.tuning_.noise
        assert np.array_equal(loaded.tuning_.l2, cp.tuning_.l2)
        assert torch.equal(loaded.predict_interval(X, 0.8).intervals, cp.predict_interval(X, 0.8).intervals)

    def test_other_words_are_refused(self):
        X = torch.randn(20, 3, dtype=torch.float64)
        with pytest.raises(ValueError, match=r"l2 must be 'marglik', a number or an array.*, got 'evidence'"):
            self.make(fullcp.FullConformalRegressor, "evidence").conformalize(X, X[:, 0])


def dense_in_structure(model, X, e, precision, variance, curvature):
    """The formula on S as the structure has it: dense blocks made of plain autograd gradients."""
    parameters = list(model.parameters())
    phi = dense_jacobian(model, X)[1]  # (N, O, D)
    names = [name for name, _ in model.named_parameters()]
    N, O, _ = phi.shape
    S = torch.zeros(phi.shape[2], phi.shape[2], dtype=torch.float64)
    if curvature == "diagonal":
        S = torch.diag(phi.square().sum((0, 1)))
    elif curvature == "last_layer":
        keep = torch.cat([torch.full((p.numel(),), "2." in name) for name, p in zip(names, parameters)])
        phi = phi[:, :, keep]
        S = phi.flatten(0, 1).T @ phi.flatten(0, 1)
        parameters = parameters[2:]
    else:
        inputs = [X, torch.tanh(X @ model[0].weight.T + model[0].bias).detach()]
        start = 0
        for layer, a in zip((model[0], model[2]), inputs):
            k = layer.weight.numel()
            bias = slice(start + k, start + k + len(layer.bias))
            g = phi[:, :, bias].flatten(0, 1)  # the signals: gradients in the bias
            S[start : start + k, start : start + k] = torch.kron(g.T @ g / N, a.T @ a)
            S[bias, bias] = g.T @ g
            start = bias.stop
    d = torch.cat([v * torch.ones(p.numel(), dtype=torch.float64) for p, v in zip(parameters, precision)])
    theta = torch.cat([p.detach().flatten() for p in parameters])
    n, v = e.numel(), variance
    fit = n * np.log(2 * np.pi * v) + float(e.square().sum()) / v
    return (
        float(d.log().sum() - (d * theta.square()).sum() - torch.linalg.slogdet(S / v + torch.diag(d))[1]) - fit
    ) / 2


@settings(max_examples=30)
@given(
    curvature=st.sampled_from(["kfac", "diagonal", "last_layer"]),
    rows=st.integers(2, 30),
    hidden=st.integers(1, 5),
    outputs=st.integers(1, 3),
    structure=st.sampled_from(["layer", "scalar"]),
    seed=st.integers(0, 10**6),
)
def test_other_structures_have_the_dense_formula_too(curvature, rows, hidden, outputs, structure, seed):
    model, X, e, _ = problem(rows, hidden, outputs, seed)
    features = FeatureRows(jacobian_for(curvature, model, X), X, memory=10**8)
    evidence = evidence_of(features, e, structure, curvature)
    groups = {"layer": 2 if curvature == "last_layer" else 4, "scalar": 1}[structure]
    assert evidence.groups == groups
    rng = np.random.default_rng(seed)
    x, log_variance = rng.uniform(-3, 3, groups), rng.uniform(-3, 2)
    tensors = 2 if curvature == "last_layer" else 4
    precision = torch.from_numpy(np.exp(x)).expand(tensors) if structure == "scalar" else torch.from_numpy(np.exp(x))
    expected = dense_in_structure(model, X, e, precision, np.exp(log_variance), curvature)
    arguments = at(x, np.exp(log_variance))
    assert evidence(*arguments).value.item() == pytest.approx(expected, rel=1e-8, abs=1e-7)
    check_gradient(evidence, *arguments)


@pytest.mark.parametrize("curvature", ["kfac", "diagonal", "last_layer"])
def test_predictors_tune_with_the_curvature_they_use(curvature):
    model, X, e, _ = problem(40, 4)
    y = model(X).detach() + e
    found = fullcp.FullConformalRegressor(model, curvature, score="standard").conformalize(X, y).tuning_
    features = FeatureRows(jacobian_for(curvature, model, X), X, memory=10**8)
    evidence = evidence_of(features, e, "layer", curvature)
    at_best = evidence(*at(np.log(found.l2 / found.noise**2), found.noise**2))
    assert at_best.value.item() == pytest.approx(found.log_marginal_likelihood, rel=1e-9)
    full = fullcp.FullConformalRegressor(model).conformalize(X, y).tuning_
    assert len(found.l2) == (2 if curvature == "last_layer" else 4)
    assert abs(found.log_marginal_likelihood - full.log_marginal_likelihood) > 1e-3


@pytest.mark.parametrize("structure", ["layer", "scalar"])
@pytest.mark.parametrize("inputs", [5, 30])
def test_wide_last_layers_are_tuned_by_kernels(structure, inputs):
    """More inputs than rows or fewer: the value found is that of the dense formula at the l2 found."""
    from fullcp.curvature import jacobian_for
    from fullcp.features import FeatureRows
    from fullcp.tuning import tune
    from reference import log_marginal_likelihood

    torch.manual_seed(3)
    head = nn.Linear(inputs, 2).double()
    z = torch.randn(12, inputs, dtype=torch.float64)
    y = head(z).detach() + 0.5 * torch.randn(12, 2, dtype=torch.float64)
    features = FeatureRows(jacobian_for("last_layer", head, z), z, memory=10**9)
    e = y - features.predictions
    found = tune(features, e, structure=structure, curvature="last_layer")
    rows = torch.cat([z, torch.ones(12, 1)], 1)
    theta = torch.cat([head.weight, head.bias[:, None]], 1).detach()  # (2, p + 1)
    l2 = torch.from_numpy(found.l2)
    each = torch.cat([l2[0].expand(inputs), l2[-1:]])
    expected = sum(
        log_marginal_likelihood(rows, e[:, o], theta[o], each / found.noise**2, torch.tensor(found.noise**2).double())
        for o in range(2)
    )
    assert found.log_marginal_likelihood == pytest.approx(float(expected), rel=1e-8)
