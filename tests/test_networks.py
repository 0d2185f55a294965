"""Networks: intervals, sets and p-values equal dense float64 algebra on plain autograd Jacobians."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import fullcp
from cases import NETWORKS, build
from fullcp.predictors.full import FullConformalRegressor
from reference import DenseGaussNewton, dense_jacobian, need

LEVELS = [0.5, 0.8, 0.9]
ONE_OUTPUT = ["linear", "mlp", "tied", "own parameter", "batch norm", "recurrent", "tokens"]


def one_output(name, rows, seed=0):
    """A network with one output, rows for it and noisy targets; two outputs are cut to their first."""
    model, X = build(name, rows, seed)
    if dense_jacobian(model.eval(), X[:2])[0].shape[1] > 1:
        model = nn.Sequential(model, nn.Linear(2, 1).double())
    f = dense_jacobian(model, X)[0][:, 0]
    generator = torch.Generator().manual_seed(seed)
    return model.train(), X, f + 0.5 * torch.randn(rows, generator=generator, dtype=torch.float64)


def dense_parts(model, X, y, X_new, l2, refine):
    model.eval()
    (f, phi), (f_new, phi_new) = ([t.numpy() for t in dense_jacobian(model, x)] for x in (X, X_new))
    f, phi, f_new, phi_new = f[:, 0], phi[:, 0], f_new[:, 0], phi_new[:, 0]
    e = y.numpy() - f
    l2 = np.broadcast_to(l2, phi.shape[1])
    if refine:
        theta = np.concatenate([p.detach().numpy().ravel() for p in model.parameters() if p.requires_grad])
        refined = np.linalg.solve(phi.T @ phi + np.diag(l2), phi.T @ (phi @ theta + e))
        e, f_new = e - phi @ (refined - theta), f_new + phi_new @ (refined - theta)
    return phi, e, phi_new, f_new, l2


@pytest.mark.parametrize("refine", [False, True])
@pytest.mark.parametrize("score", ["standard", "deleted", "studentized"])
@pytest.mark.parametrize("rows", [20, 90])
@pytest.mark.parametrize("name", ONE_OUTPUT)
def test_intervals_equal_dense_algebra(name, rows, score, refine):
    model, X, y = one_output(name, rows)
    X_new = torch.cat([X[:3] + 0.1, 2 * torch.randn_like(X[:5])])
    phi, e, phi_new, f_new, l2 = dense_parts(model, X, y, X_new, 0.3, refine)
    for residuals in ("absolute", "signed"):
        cp = FullConformalRegressor(model, score=score, residuals=residuals, l2=0.3, refine=refine).conformalize(X, y)
        prediction, intervals = cp.predict_interval(X_new, LEVELS)
        np.testing.assert_allclose(prediction.numpy(), f_new, rtol=1e-6, atol=1e-8)
        for i, (row, f) in enumerate(zip(phi_new, f_new, strict=True)):
            dense = DenseGaussNewton.at(phi, e, row, f, l2, score)
            for j, level in enumerate(LEVELS):
                if residuals == "signed":
                    np.testing.assert_allclose(intervals[i, :, j], dense.signed_interval(level), rtol=1e-6, atol=1e-8)
                    continue
                pieces = dense.absolute_set(level)
                found = cp.predict_set(X_new[i : i + 1], level)[0]
                np.testing.assert_allclose(found, pieces, rtol=1e-6, atol=1e-8)
                np.testing.assert_allclose(intervals[i, :, j], (pieces[0][0], pieces[-1][1]), rtol=1e-6, atol=1e-8)


def test_score_lines_are_the_scores():
    model, X, y = one_output("mlp", 25)
    X_new = torch.randn_like(X[:4])
    phi, e, phi_new, f_new, l2 = dense_parts(model, X, y, X_new, 0.3, False)
    for score in ("standard", "deleted", "studentized"):
        cp = FullConformalRegressor(model, score=score, l2=0.3).conformalize(X, y)
        A, B, b = cp.score_lines(X_new)
        for i in range(4):
            dense = DenseGaussNewton.at(phi, e, phi_new[i], f_new[i], l2, score)
            for label in (-2.0, 0.0, 3.0):
                r = label - f_new[i]
                np.testing.assert_allclose(A[i] - B[i] * r, dense.a[:-1] + dense.b[:-1] * label, rtol=1e-8)
                np.testing.assert_allclose(b[i] * r, dense.a[-1] + dense.b[-1] * label, rtol=1e-8)


def test_float32_network_equals_algebra_on_its_own_jacobian():
    """Networks stay in their dtype; from their float32 numbers on, everything is float64."""
    model, X, y = one_output("mlp", 60)
    model, X, y = model.float(), X.float(), y.float()
    X_new = torch.randn_like(X[:6])
    phi, e, phi_new, f_new, l2 = dense_parts(model, X, y.double(), X_new, 0.3, False)
    cp = FullConformalRegressor(model, l2=0.3).conformalize(X, y)
    _, intervals = cp.predict_interval(X_new, LEVELS)
    for i in range(6):
        dense = DenseGaussNewton.at(phi, e, phi_new[i], f_new[i], l2, "studentized")
        for j, level in enumerate(LEVELS):
            pieces = dense.absolute_set(level)
            np.testing.assert_allclose(intervals[i, :, j], (pieces[0][0], pieces[-1][1]), rtol=2e-5)


@pytest.mark.parametrize(("score", "share"), [("standard", 0.4), ("deleted", 2.0)])
def test_far_away_points_get_unions_and_rays(score, share):
    """Where |B_i| >= b for some i the set is no single interval; the sweep must find what a grid of labels finds."""
    torch.manual_seed(3)
    X, x_new = torch.randn(30, 2, dtype=torch.float64), torch.tensor([[9.0, -7.0]], dtype=torch.float64)
    y = X.sum(1) + torch.randn(30, dtype=torch.float64)
    X[0] = x_new[0] * share  # a training row of high leverage in the same direction
    y[0] += 8.0
    model = nn.Linear(2, 1, bias=False).double()
    cp = FullConformalRegressor(model, score=score, residuals="absolute", l2=1e-3, refine=True).conformalize(X, y)
    A, B, b = (part.numpy() for part in cp.score_lines(x_new))
    assert (np.abs(B[0]) >= b[0]).any()
    f = cp.predict(x_new).item()
    grid = f + np.concatenate([np.linspace(-60, 60, 24001), np.linspace(-1e4, 1e4, 4001)])
    shapes = set()
    for level in np.linspace(0.02, 0.96, 48).round(2):
        pieces = cp.predict_set(x_new, level)[0]
        least = need(level, 30, "absolute")
        truth = (np.abs(A[0][:, None] - B[0][:, None] * (grid - f)) >= b[0] * np.abs(grid - f)).sum(0) >= least
        inside = np.any([(lo <= grid) & (grid <= hi) for lo, hi in pieces], axis=0)
        assert np.array_equal(inside, truth)
        shapes.add((len(pieces), any(np.isinf(end) for piece in pieces for end in piece)))
    assert max(count for count, _ in shapes) > 1
    assert {True, False} == {infinite for _, infinite in shapes}


@pytest.mark.parametrize("rows", [7, 60])
def test_memory_budget_changes_nothing(rows):
    model, X, y = one_output("mlp", rows)
    X, y = X.repeat(20, 1), y.repeat(20) + torch.linspace(0, 1, 20 * rows).double()
    X_new = torch.randn(300, 5, dtype=torch.float64)
    results = []
    for memory in ("1MB", "5MB", "2GB"):
        for residuals in ("absolute", "signed"):
            cp = fullcp.FullConformalRegressor(model, residuals=residuals, memory=memory).conformalize(X, y)
            results.append(cp.predict_interval(X_new, LEVELS).intervals)
            if memory == "1MB":
                assert cp._engine.points < 300
    for other in (2, 4):
        torch.testing.assert_close(results[other], results[0], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(results[other + 1], results[1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", [name for name in NETWORKS if name != "recurrent"])
def test_every_kind_of_network_goes_through(name):
    model, X = build(name, rows=40)
    y = model.eval()(X).detach() + torch.randn(40, 1, dtype=torch.float64)
    if y.ndim == 2 and model(X[:1]).ndim == 1:
        y = y[:, 0]
    cp = fullcp.FullConformalRegressor(model).conformalize(X, y)
    intervals = cp.predict_interval(X, 0.8).intervals
    assert torch.isfinite(intervals).all()
