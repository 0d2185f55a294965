"""Several outputs: the paper's appendix, by refits of the linearised network with vector labels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import fullcp
from reference import dense_jacobian, need

LEVELS = [0.5, 0.8]


def network(outputs, hidden=4, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, hidden), nn.Tanh(), nn.Linear(hidden, outputs)).double()


def refit_residuals(phi, e, phi_new, r, l2):
    """Residuals of all N + 1 rows after a refit of the ridge problem around theta_* with the new label f + r.

    phi (N, O, D), e (N, O): the linearised problem at its minimum, in the change of weights.
    """
    N, O, D = phi.shape
    X = np.vstack([phi.reshape(N * O, D), phi_new])
    target = np.append(e.ravel(), r)
    change = np.linalg.solve(X.T @ X + l2 * np.eye(D), X.T @ target - phi.reshape(N * O, D).T @ e.ravel())
    return (target - X @ change).reshape(N + 1, O)


def root(M):
    values, Q = np.linalg.eigh(M)
    return Q @ np.diag(np.sqrt(values)) @ Q.T


def dense_changepoints(phi, e, phi_new, l2, score):
    """Vector changepoints (N, O) and whether each counts, from refits at r = 0 and at the unit labels."""
    N, O, D = phi.shape
    base = refit_residuals(phi, e, phi_new, np.zeros(O), l2)
    slopes = np.stack([refit_residuals(phi, e, phi_new, unit, l2) - base for unit in np.eye(O)], axis=2)
    X = np.vstack([phi.reshape(N * O, D), phi_new])
    hat = X @ np.linalg.solve(X.T @ X + l2 * np.eye(D), X.T)
    weights = []
    for i in range(N + 1):
        gap = np.eye(O) - hat[i * O : (i + 1) * O, i * O : (i + 1) * O]
        inverse = np.linalg.inv(gap)
        weights.append({"standard": np.eye(O), "deleted": inverse, "studentized": root(inverse)}[score])
    points, counts = [], []
    for i in range(N):
        M = weights[-1] @ slopes[-1] - weights[i] @ slopes[i]
        points.append(np.linalg.solve(M, weights[i] @ base[i] - weights[-1] @ base[-1]))
        counts.append(np.linalg.eigvalsh(M + M.T).min() > 0)
    return np.array(points), np.array(counts)


@pytest.mark.parametrize("score", ["standard", "deleted", "studentized"])
@pytest.mark.parametrize(("rows", "hidden", "outputs", "spread"), [(25, 4, 2, 1.0), (9, 6, 3, 1.0), (14, 3, 2, 40.0)])
def test_intervals_equal_refits(score, rows, hidden, outputs, spread):
    model = network(outputs, hidden)
    X = torch.randn(rows, 3, dtype=torch.float64)
    X_new = torch.cat([X[:2], spread * torch.randn(5, 3, dtype=torch.float64)])
    with torch.no_grad():
        y = model(X) + torch.randn(rows, outputs, dtype=torch.float64)
    cp = fullcp.FullConformalRegressor(model, score=score, l2=0.2).conformalize(X, y)
    prediction, intervals = cp.predict_interval(X_new, LEVELS)
    (f, phi), (f_new, phi_new) = ([t.numpy() for t in dense_jacobian(model, x)] for x in (X, X_new))
    np.testing.assert_allclose(prediction, f_new)
    wholes = 0
    for i in range(len(X_new)):
        points, counts = dense_changepoints(phi, y.numpy() - f, phi_new[i], 0.2, score)
        wholes += (~counts).sum()
        lower = np.sort(np.where(counts[:, None], points, -np.inf), axis=0)
        upper = np.sort(np.where(counts[:, None], points, np.inf), axis=0)
        for j, level in enumerate(LEVELS):
            k = need(level, rows, "signed")
            low, high = f_new[i] + lower[k - 1], f_new[i] + upper[rows - k]
            np.testing.assert_allclose(intervals[i, :, j], [low, high], rtol=1e-6, atol=1e-8)
        labels = f_new[i] + np.random.default_rng(0).normal(size=(20, outputs))
        p = cp.p_value(X_new[i : i + 1].expand(20, 3), labels).numpy()
        least = np.minimum(
            (lower[None] <= (labels - f_new[i])[:, None]).sum(1), (upper[None] >= (labels - f_new[i])[:, None]).sum(1)
        )
        np.testing.assert_allclose(p, np.minimum(2 * (1 + least) / (rows + 1), 1.0))
    if spread > 1 and score == "standard":
        assert wholes > 0  # the case of no positive definiteness is met


@pytest.mark.parametrize("score", ["standard", "deleted", "studentized"])
def test_independent_outputs_equal_single_ones(score):
    """A linear layer's outputs share no weight: the blocks are diagonal and each output stands alone."""
    torch.manual_seed(0)
    X = torch.randn(40, 3, dtype=torch.float64)
    y = torch.randn(40, 2, dtype=torch.float64)
    both = nn.Linear(3, 2).double()
    together = (
        fullcp.FullConformalRegressor(both, score=score, l2=1.0).conformalize(X, y).predict_interval(X[:9], LEVELS)
    )
    for o in range(2):
        alone = nn.Linear(3, 1).double()
        with torch.no_grad():
            alone.weight.copy_(both.weight[o : o + 1])
            alone.bias.copy_(both.bias[o : o + 1])
        cp = fullcp.FullConformalRegressor(alone, score=score, residuals="signed", l2=1.0).conformalize(X, y[:, o])
        expected = cp.predict_interval(X[:9], LEVELS)
        torch.testing.assert_close(together.intervals[..., o], expected.intervals, rtol=1e-9, atol=1e-9)


def test_bonferroni_asks_each_output_for_its_share():
    torch.manual_seed(0)
    model = network(2)
    X, y = torch.randn(90, 3, dtype=torch.float64), torch.randn(90, 2, dtype=torch.float64)
    cp = fullcp.FullConformalRegressor(model).conformalize(X, y)
    joint = cp.predict_interval(X[:5], 0.8, joint="bonferroni").intervals
    assert torch.equal(joint, cp.predict_interval(X[:5], 0.9).intervals)
    p = cp.p_value(X[:5], y[:5])
    assert p.shape == (5, 2)
    assert torch.equal(cp.p_value(X[:5], y[:5], joint="bonferroni"), (2 * p.amin(1)).clamp(max=1))
    sets = cp.predict_set(X[:5], 0.8, joint="bonferroni")
    assert len(sets) == 5
    assert len(sets[0]) == 2
    assert sets[0][1] == [tuple(joint[0, :, 0, 1].tolist())]


def test_absolute_residuals_need_one_output():
    cp = fullcp.FullConformalRegressor(network(2), residuals="absolute")
    with pytest.raises(ValueError, match="residuals='absolute' needs one output, the model has 2"):
        cp.conformalize(torch.randn(20, 3), torch.randn(20, 2))


def test_laplace_ellipsoids():
    """Volume and membership against Monte Carlo and the chi-square law; one output's ellipsoid is its interval."""
    from scipy.stats import chi2

    torch.manual_seed(0)
    model = network(2)
    X, y = torch.randn(50, 3, dtype=torch.float64), torch.randn(50, 2, dtype=torch.float64)
    la = fullcp.LaplaceRegressor(model, noise=0.7, l2=0.5).fit(X, y)
    phi = dense_jacobian(model, X)[1]
    flat = phi.flatten(0, 1)
    H_inv = torch.linalg.inv(flat.T @ flat + 0.5 * torch.eye(flat.shape[1], dtype=torch.float64))
    f_new, phi_new = dense_jacobian(model, X[:1] * 3)
    covariance = 0.49 * (torch.eye(2).double() + phi_new[0] @ H_inv @ phi_new[0].T)
    radius = chi2.ppf(0.9, 2)
    volume = la.ellipsoid_volume(X[:1] * 3, [0.9])
    expected = torch.pi * radius * covariance.det().sqrt().reshape(1, 1)
    torch.testing.assert_close(volume, expected, rtol=1e-10, atol=0)
    labels = torch.distributions.MultivariateNormal(f_new[0], covariance).sample((20000,))
    inside = la.ellipsoid_contains((X[:1] * 3).expand(20000, 3), labels, [0.5, 0.9])
    assert inside.shape == (20000, 2)
    np.testing.assert_allclose(inside.double().mean(0), [0.5, 0.9], atol=0.015)
    r = labels - f_new[0]
    assert torch.equal(inside[:, 1], (r @ torch.linalg.inv(covariance) * r).sum(1) <= radius)

    one = network(1)
    la = fullcp.LaplaceRegressor(one, l2=1.0).fit(X, y[:, 0])
    assert la.noise_ == pytest.approx((y[:, 0] - one(X)[:, 0]).square().mean().sqrt().item())
    result = la.predict_interval(X, 0.9)
    torch.testing.assert_close(la.ellipsoid_volume(X, 0.9), result.upper - result.lower, rtol=1e-10, atol=0)
    labels = torch.linspace(-2, 2, 50, dtype=torch.float64)
    inside = (result.lower[:, 0] <= labels) & (labels <= result.upper[:, 0])
    assert torch.equal(la.ellipsoid_contains(X, labels, 0.9)[:, 0], inside)
    assert torch.equal(la.p_value(X, labels) > 0.1, inside)
