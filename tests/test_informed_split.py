"""The informed split against refits of the ridge problem on training rows, calibration rows and the candidate."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import nn

import fullcp
from fullcp.curvature import PartOfRows
from reference import (
    DenseGaussNewton,
    RefitScores,
    dense_jacobian,
    dense_kfac,
    dense_low_rank,
    need,
    refit_scores,
    whole_lines,
)
from test_membership import LEVELS, candidate_labels, linear_model, problems

INFORMED = fullcp.InformedSplitConformalRegressor


def quietly(call, *arguments):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fullcp.InfiniteIntervalWarning)
        return call(*arguments)


@pytest.mark.parametrize("residuals", ["absolute", "signed"])
@pytest.mark.parametrize("score", ["standard", "deleted", "studentized"])
@settings(max_examples=200)
@given(problem=problems())
def test_membership_equals_refits_with_ranks_over_calibration_rows(score, residuals, problem):
    """Whatever the weights of the linear model: the prior brings them to the ridge solution."""
    X, y, x_new, l2, rng = problem
    T = int(rng.integers(2, len(X) - 9))
    N = len(X) - T
    theta = rng.normal(size=X.shape[1])
    cp = INFORMED(linear_model(theta), curvature="full", score=score, residuals=residuals, l2=l2)
    cp.fit(X[:T], y[:T]).conformalize(X[T:], y[T:])
    labels = candidate_labels(cp, x_new, rng)
    scores = refit_scores(X, y, x_new, labels, l2, score, delete=N <= 16)
    whole = whole_lines(X, y, x_new, l2, score)[T:] if residuals == "signed" else np.zeros(N, bool)
    tails = RefitScores(scores.train[T:], scores.new).counts(residuals, whole)
    surely = np.min([tail[0] for tail in tails], axis=0)
    possibly = np.min([tail[1] for tail in tails], axis=0)

    p = cp.p_value(np.repeat(x_new[None], len(labels), 0), labels)
    factor = (N + 1) if residuals == "absolute" else (N + 1) / 2
    assert np.all(np.minimum((1 + surely) / factor, 1.0) - 1e-12 <= p)
    assert np.all(p <= np.minimum((1 + possibly) / factor, 1.0))
    for level in LEVELS:
        pieces = quietly(cp.predict_set, x_new[None], level)[0]
        inside = np.array([any(lo <= label <= hi for lo, hi in pieces) for label in labels])
        least = need(level, N, residuals)
        decided = (surely >= least) == (possibly >= least)
        assert np.array_equal(inside[decided], (surely >= least)[decided])


def network(steps, outputs=1):
    """A small network in float64, after some steps on its rows, with rows to calibrate on and to predict."""
    torch.manual_seed(steps)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, outputs)).double()
    X = torch.randn(60, 3, dtype=torch.float64)
    y = torch.sin(2 * X[:, :1]) * torch.arange(1, outputs + 1) + 0.3 * torch.randn(60, outputs, dtype=torch.float64)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=steps, tolerance_grad=1e-10, tolerance_change=0)

    def loss():
        optimizer.zero_grad()
        value = (model(X[:30]) - y[:30]).square().sum() / 2 + 0.35 * parameters_of(model).square().sum()
        value.backward()
        return value

    if steps:
        optimizer.step(loss)
    return model, X, y


def parameters_of(model):
    return torch.cat([p.flatten() for p in model.parameters()])


def dense(model, X, y, T, C, H_T, l2, *, gradient=True):
    """Delta, refined residuals of C, predictions of X and H, by dense inverses."""
    f, phi = dense_jacobian(model, X)
    e = y - f
    g = l2 * parameters_of(model).detach() - torch.einsum("nod,no->d", phi[T], e[T])
    H = H_T + torch.einsum("nod,noe->de", phi[C], phi[C])
    step = torch.linalg.solve(H, torch.einsum("nod,no->d", phi[C], e[C]) - gradient * g)
    return phi, H, e[C] - phi[C] @ step, f + phi @ step


T_C = {
    "primal": (slice(0, 30), slice(30, 50)),
    "dual": (slice(0, 8), slice(30, 40)),
    "between": (slice(0, 20), slice(30, 50)),
}


@pytest.mark.parametrize("rows", T_C)
@pytest.mark.parametrize("residuals", ["absolute", "signed"])
@pytest.mark.parametrize("score", ["standard", "deleted", "studentized"])
@pytest.mark.parametrize("steps", [0, 10, 2000])
def test_networks_equal_dense_algebra(steps, score, residuals, rows):
    """At the minimum, short of it and at random weights."""
    (model, X, y), (T, C) = network(steps), T_C[rows]
    l2 = 0.7 * torch.ones(26, dtype=torch.float64)
    cp = INFORMED(model, score=score, residuals=residuals, l2=0.7).fit(X[T], y[T, 0]).conformalize(X[C], y[C, 0])
    f, phi_all = dense_jacobian(model, X)
    H_T = torch.einsum("nod,noe->de", phi_all[T], phi_all[T]) + torch.diag(l2)
    phi, H, e, centre = dense(model, X, y, T, C, H_T, l2)
    H_rest = (H - torch.einsum("nod,noe->de", phi[C], phi[C])).numpy()
    root = np.linalg.cholesky(np.linalg.inv(H_rest))  # DenseGaussNewton takes a diagonal: in coordinates where it is I
    psi = phi[:, 0].numpy() @ root
    np.testing.assert_allclose(cp.predict(X), centre[:, 0], atol=1e-9)
    np.testing.assert_allclose(cp._engine.e[:, 0], e[:, 0], atol=1e-9)
    for i in range(50, 60):
        truth = DenseGaussNewton.at(psi[C], e[:, 0].numpy(), psi[i], float(centre[i, 0]), np.ones(26), score)
        for level in (0.5, 0.8):
            pieces = cp.predict_set(X[i : i + 1], level)[0]
            expected = truth.absolute_set(level) if residuals == "absolute" else [truth.signed_interval(level)]
            np.testing.assert_allclose(np.array(pieces), np.array(expected), rtol=1e-6, atol=1e-6)


def test_the_gradient_of_the_training_rows_counts():
    """Short of the minimum the step without g_T is another one, and not what is computed."""
    (model, X, y), (T, C) = network(10), T_C["primal"]
    l2 = 0.7 * torch.ones(26, dtype=torch.float64)
    cp = INFORMED(model, l2=0.7).fit(X[T], y[T, 0]).conformalize(X[C], y[C, 0])
    phi = dense_jacobian(model, X)[1]
    H_T = torch.einsum("nod,noe->de", phi[T], phi[T]) + torch.diag(l2)
    found = cp._engine.e[:, 0]
    with_g, without = (dense(model, X, y, T, C, H_T, l2, gradient=g)[2][:, 0] for g in (True, False))
    torch.testing.assert_close(found, with_g, atol=1e-9, rtol=0)
    assert float((found - without).abs().max()) > 1e-2


def dense_prior(curvature, model, X, phi):
    """H_T - diag(l2) of an approximation."""
    S = torch.einsum("nod,noe->de", phi, phi)
    if curvature == "diagonal":
        return torch.diag(S.diagonal())
    if curvature == "kfac":
        return torch.block_diag(*dense_kfac(model, X).values())
    scale = torch.diag(torch.full((len(S),), 0.7, dtype=torch.float64).sqrt())
    return scale @ dense_low_rank(torch.linalg.inv(scale) @ S @ torch.linalg.inv(scale), 9) @ scale


@pytest.mark.parametrize("rows", [slice(30, 40), slice(30, 60)], ids=["few rows", "many rows"])
@pytest.mark.parametrize("curvature", ["kfac", "diagonal", "low_rank:9"])
@pytest.mark.parametrize("steps", [10, 2000])
def test_approximate_priors_with_exact_calibration_rows(steps, curvature, rows):
    """H = H_T approximated + sum_C phi phi^T: leverages below 1, and all as dense algebra has it."""
    (model, X, y), T = network(steps), slice(0, 30)
    l2 = 0.7 * torch.ones(26, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fullcp.LowRankWarning)
        cp = INFORMED(model, curvature=curvature, l2=0.7).fit(X[T], y[T, 0])
    cp.conformalize(X[rows], y[rows, 0])
    assert cp.score_ == "studentized"
    phi = dense_jacobian(model, X)[1]
    H_T = dense_prior(curvature, model, X[T], phi[T]) + torch.diag(l2)
    phi, H, e, centre = dense(model, X, y, T, rows, H_T, l2)
    torch.testing.assert_close(cp.predict(X), centre[:, 0], atol=1e-7, rtol=0)
    torch.testing.assert_close(cp._engine.e, e, atol=1e-7, rtol=0)
    P = phi[:, 0]
    h = torch.einsum("nd,de,ne->n", P[rows], torch.linalg.inv(H), P[rows])
    np.testing.assert_allclose(cp.leverages_, h, atol=1e-7)
    assert cp.leverages_.max() < 1
    query = cp.curvature_.query(cp.network_(X)[1])
    count = rows.stop - rows.start
    torch.testing.assert_close(
        query.cross(slice(0, count))[..., 0, 0], P @ torch.linalg.solve(H, P[rows].T), atol=1e-7, rtol=0
    )


@pytest.mark.parametrize("T_rows", [4, 12, 30])
@pytest.mark.parametrize("curvature", ["full", "last_layer"])
def test_several_outputs(curvature, T_rows):
    model, X, y = network(10, outputs=2)
    T, C = slice(0, T_rows), slice(30, 45)
    cp = INFORMED(model, curvature=curvature, l2=0.7).fit(X[T], y[T]).conformalize(X[C], y[C])
    if curvature == "last_layer":
        model = copy.deepcopy(model)
        model[0].requires_grad_(False)
    phi = dense_jacobian(model, X)[1]
    theta = torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])
    f = model(X).detach()
    e = y - f
    S = torch.einsum("nod,noe->de", phi[T], phi[T]) + 0.7 * torch.eye(len(theta), dtype=torch.float64)
    g = 0.7 * theta - torch.einsum("nod,no->d", phi[T], e[T])
    H = S + torch.einsum("nod,noe->de", phi[C], phi[C])
    step = torch.linalg.solve(H, torch.einsum("nod,no->d", phi[C], e[C]) - g)
    torch.testing.assert_close(cp.predict(X), f + phi @ step, atol=1e-9, rtol=0)
    V = phi[C] @ torch.linalg.solve(H, phi[C].mT)
    torch.testing.assert_close(cp._engine.slack, torch.eye(2, dtype=torch.float64) - V, atol=1e-9, rtol=0)
    query = cp.curvature_.query(cp.network_(X[50:])[1])
    expected = torch.einsum("nod,mde->mnoe", phi[C], torch.linalg.solve(H, phi[50:].mT))
    torch.testing.assert_close(query.cross(slice(0, 15)), expected, atol=1e-9, rtol=0)
    with pytest.raises(ValueError, match="residuals='absolute' needs one output"):
        INFORMED(model, residuals="absolute").fit(X[T], y[T])


def test_kernels_of_large_networks_serve(tmp_path):
    """Gradients of all rows do not fit, and nothing else changes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 400), nn.Tanh(), nn.Linear(400, 40), nn.Tanh(), nn.Linear(40, 1)).double()
    X = torch.randn(50, 3, dtype=torch.float64)
    y = X[:, 0] + 0.1 * torch.randn(50, dtype=torch.float64)
    found, expected = (
        INFORMED(model, curvature="full", l2=1.0, memory=memory).fit(X[:20], y[:20]).conformalize(X[20:], y[20:])
        for memory in ("4MB", "2GB")
    )
    assert isinstance(found.curvature_, PartOfRows)
    assert (found.curvature_.name, expected.curvature_.name) == ("full, kernels", "full, dual")
    intervals = found.predict_interval(X).intervals
    torch.testing.assert_close(intervals, expected.predict_interval(X).intervals)
    found.save(tmp_path / "cp")
    assert torch.equal(INFORMED.load(tmp_path / "cp", model).predict_interval(X).intervals, intervals)


def test_mapped_rows_serve(tmp_path):
    model, X, y = network(10)
    np.save(tmp_path / "x.npy", X.numpy())
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    for T, C in T_C.values():
        found, expected = (
            INFORMED(model, l2=0.7).fit(x[T], y[T, 0].numpy()).conformalize(x[C], y[C, 0].numpy())
            for x in (mapped, X.numpy())
        )
        np.testing.assert_array_equal(found.predict_interval(X.numpy())[1], expected.predict_interval(X.numpy())[1])
        found.save(tmp_path / "cp")
        loaded = INFORMED.load(tmp_path / "cp", model)
        np.testing.assert_array_equal(loaded.predict_interval(X.numpy())[1], found.predict_interval(X.numpy())[1])


def test_calibration_rows_have_no_part_in_tuning():
    model, X, y = network(2000)
    cp = INFORMED(model).fit(X[:30], y[:30, 0])
    l2 = cp.tuning_.l2.copy()
    np.testing.assert_array_equal(l2, fullcp.FullConformalRegressor(model).conformalize(X[:30], y[:30, 0]).tuning_.l2)
    cp.conformalize(X[30:50], 100 * y[30:50, 0])
    np.testing.assert_array_equal(cp.tuning_.l2, l2)


def test_what_is_wrong_is_said():
    model, X, y = network(10)
    y = y[:, 0]
    cp = INFORMED(model, l2=0.7)
    with pytest.raises(fullcp.NotFittedError, match="call fit"):
        cp.conformalize(X, y)
    cp.fit(X[:30], y[:30])
    with pytest.raises(fullcp.NotFittedError, match=r"call fit\(X_train, y_train\).conformalize"):
        cp.predict(X)
    with pytest.raises(ValueError, match="X has rows of shape"):
        cp.conformalize(X[:, :2], y)
    with torch.no_grad():
        model[0].weight.mul_(2)
    with pytest.raises(fullcp.NotFittedError, match="changed since fit"):
        cp.conformalize(X[30:], y[30:])
    with pytest.raises(ValueError, match="score must be"):
        INFORMED(model, score="best").fit(X, y)
    for T in (8, 30):  # fewer rows than parameters, and more
        with pytest.raises(ValueError, match="l2 must be one number, 4 values"):
            INFORMED(model, l2=[1.0, 2.0]).fit(X[:T], y[:T])
    far = X.clone()
    far[40:42] *= 1e9
    linear = INFORMED(nn.Linear(3, 1).double(), l2=1e-9).fit(X[:30], y[:30])
    with pytest.raises(fullcp.NotPositiveDefiniteError, match="fit with a larger l2"):
        linear.conformalize(far[30:42], y[30:42])
