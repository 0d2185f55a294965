"""Linear models: membership of every label equals explicit refits of the augmented ridge problem."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fullcp
from reference import need, refit_scores, ridge, whole_lines

LEVELS = [0.5, 0.8, 0.9, 0.95, 0.99]


@st.composite
def problems(draw):
    """A ridge problem with a test point: sizes, tails, leverage and penalties of all kinds."""
    N, D = draw(st.integers(12, 40)), draw(st.integers(1, 60))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    X, x_new = rng.normal(size=(N, D)), rng.normal(size=D)
    y = X @ rng.normal(size=D) / np.sqrt(D) + rng.normal(size=N)
    if draw(st.booleans()):  # heavy tails in the targets
        y += 10 * rng.standard_t(1.5, size=N)
    if draw(st.booleans()):  # some rows far out
        X[rng.integers(0, N, 2)] *= 10.0 ** draw(st.integers(1, 2))
    x_new = x_new * 10.0 ** draw(st.sampled_from([-1, 0, 0, 1, 2]))
    if draw(st.integers(0, 3)) == 0:  # near a training row, where cross leverages are largest
        x_new = X[0] * draw(st.sampled_from([1.0, -3.0, 2.0])) + 1e-3 * rng.normal(size=D)
    l2 = 10.0 ** draw(st.integers(-2, 2)) * np.ones(D)
    if draw(st.booleans()):
        l2 = l2 * 10.0 ** rng.uniform(-1, 1, size=D)
    return X, y, x_new, l2, rng


def linear_model(theta):
    model = torch.nn.Linear(len(theta), 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.from_numpy(theta)[None])
    return model


def conformalize(X, y, l2, score, residuals, *, converged):
    """A predictor on the ridge solution itself, or on arbitrary weights and refined to it."""
    theta = ridge(X, y[:, None], l2)[:, 0] if converged else np.linspace(-1, 1, X.shape[1])
    cp = fullcp.FullConformalRegressor(
        linear_model(theta), score=score, residuals=residuals, l2=l2, refine=not converged
    )
    return cp.conformalize(X, y)


def candidate_labels(cp, x_new, rng):
    """Labels far and near, and a hair to each side of every end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fullcp.InfiniteIntervalWarning)
        ends = [end for level in LEVELS for piece in cp.predict_set(x_new[None], level)[0] for end in piece]
    f = cp.predict(x_new[None])[0]
    ends = np.array([end for end in ends if np.isfinite(end)])
    scale = 1 + np.abs(ends - f).max(initial=0.0)
    hairs = np.concatenate([ends + side * 1e-5 * (1e-2 + np.abs(ends - f)) for side in (-1, 1)]) if len(ends) else ends
    return np.concatenate([[f], hairs, f + scale * rng.normal(size=6), f + scale * rng.standard_cauchy(size=6)])


@pytest.mark.parametrize("residuals", ["absolute", "signed"])
@pytest.mark.parametrize("score", ["standard", "deleted", "studentized"])
@settings(max_examples=350)
@given(problem=problems(), converged=st.booleans())
def test_membership_equals_refits(score, residuals, problem, converged):
    X, y, x_new, l2, rng = problem
    N = len(X)
    cp = conformalize(X, y, l2, score, residuals, converged=converged)
    labels = candidate_labels(cp, x_new, rng)
    delete = N <= 16
    scores = refit_scores(X, y, x_new, labels, l2, score, delete=delete)
    whole = whole_lines(X, y, x_new, l2, score) if residuals == "signed" else np.zeros(N, bool)
    tails = scores.counts(residuals, whole)
    surely = np.min([tail[0] for tail in tails], axis=0)
    possibly = np.min([tail[1] for tail in tails], axis=0)

    p = cp.p_value(np.repeat(x_new[None], len(labels), 0), labels)
    factor = (N + 1) if residuals == "absolute" else (N + 1) / 2
    high = np.minimum((1 + possibly) / factor, 1.0)
    low = np.minimum((1 + surely) / factor, 1.0)
    assert np.all((low - 1e-12 <= p) & (p <= high + 1e-12))

    for level in LEVELS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", fullcp.InfiniteIntervalWarning)
            pieces = cp.predict_set(x_new[None], level)[0]
            hull = cp.predict_interval(x_new[None], level).intervals[0, :, 0]
        inside = np.array([any(lo <= label <= hi for lo, hi in pieces) for label in labels])
        least = need(level, N, residuals)
        decided = (surely >= least) == (possibly >= least)
        assert np.array_equal(inside[decided], (surely >= least)[decided])
        assert hull[0] == pieces[0][0]
        assert hull[1] == pieces[-1][1]
        assert all(a[1] < b[0] for a, b in itertools.pairwise(pieces))
