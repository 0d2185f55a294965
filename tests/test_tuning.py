"""The marginal likelihood against its dense formula, finite differences, and direct integration."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fullcp
from fullcp.features import FeatureRows, Jacobian
from fullcp.tuning import Evidence, tune
from reference import dense_jacobian


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
    n = e.numel()
    A = phi.T @ phi / variance + torch.diag(d)
    return (
        -n / 2 * np.log(2 * np.pi * variance)
        - float(e.square().sum()) / (2 * variance)
        + 0.5 * float(d.log().sum() - (d * theta.square()).sum())
        - 0.5 * float(torch.linalg.slogdet(A)[1])
    )


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
    evidence = Evidence(features, e, structure=structure)
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.uniform(-3, 3, evidence.groups))
    log_variance = rng.uniform(-3, 2)
    found = evidence(x, log_variance)
    precision = x.exp().expand(4) if structure == "scalar" else x.exp()
    assert found.value == pytest.approx(dense(model, X, e, precision, np.exp(log_variance)), rel=1e-9, abs=1e-8)
    step = 1e-5
    for g in range(evidence.groups):
        shift = torch.zeros_like(x)
        shift[g] = step
        slope = (evidence(x + shift, log_variance).value - evidence(x - shift, log_variance).value) / (2 * step)
        assert found.in_log_precision[g].item() == pytest.approx(slope, rel=1e-5, abs=1e-5)
    slope = (evidence(x, log_variance + step).value - evidence(x, log_variance - step).value) / (2 * step)
    assert found.in_log_variance == pytest.approx(slope, rel=1e-5, abs=1e-5)


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
    found = Evidence(features, (y - model(X)).detach())(torch.tensor([d]).double().log(), float(np.log(v)))
    covariance = v * torch.eye(15).double() + X @ X.T / d
    exact = torch.distributions.MultivariateNormal(torch.zeros(15).double(), covariance).log_prob(y[:, 0])
    assert found.value == pytest.approx(exact.item(), rel=1e-10)


@pytest.mark.parametrize(("rows", "hidden"), [(60, 3), (12, 6)])
@pytest.mark.parametrize("structure", ["layer", "scalar"])
def test_tuning_finds_the_maximum(rows, hidden, structure):
    model, X, e, features = problem(rows, hidden)
    found = tune(features, e, structure=structure)
    evidence = Evidence(features, e, structure=structure)
    log_precision = torch.from_numpy(found.l2 / found.noise**2).log()
    at = evidence(log_precision, 2 * np.log(found.noise))
    assert at.value == pytest.approx(found.log_marginal_likelihood, rel=1e-9)
    inside = log_precision.abs() < 15.9
    assert at.in_log_precision[inside].abs().max() < 0.02
    assert abs(at.in_log_variance) < 0.02
    rng = np.random.default_rng(0)
    for _ in range(50):
        shift = torch.from_numpy(rng.normal(size=evidence.groups))
        assert evidence(log_precision + shift, 2 * np.log(found.noise) + rng.normal()).value <= at.value + 1e-4


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


def test_same_number_as_laplace_torch():
    laplace = pytest.importorskip("laplace", reason="laplace-torch does not install beside the CPU build")
    model, X, e, features = problem(30)
    y = model(X).detach() + e
    oracle = laplace.Laplace(model, "regression", subset_of_weights="all", hessian_structure="full", sigma_noise=0.8)
    oracle.fit(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, y), batch_size=30))
    expected = oracle.log_marginal_likelihood(torch.tensor(2.0)).item()
    found = Evidence(features, e, structure="scalar")(torch.tensor([2.0]).double().log(), 2 * np.log(0.8))
    assert found.value == pytest.approx(expected, rel=1e-6)


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
        with pytest.raises(ValueError, match="l2 must be 'marglik', a number or an array of numbers, got 'evidence'"):
            self.make(fullcp.FullConformalRegressor, "evidence").conformalize(X, X[:, 0])
