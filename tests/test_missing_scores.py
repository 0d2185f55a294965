"""Approximate curvature with leverages of 1 and more: sets by definition, on a grid of labels."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import fullcp
from reference import dense_jacobian, dense_kfac, need

LEVELS = [0.3, 0.5, 0.8, 0.9]


def problem(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    X = torch.randn(40, 3, dtype=torch.float64)
    y = X[:, 0] + torch.randn(40, dtype=torch.float64)
    return model, X, y


def dense_H(model, X, curvature, l2):
    if curvature == "kfac":
        S = torch.block_diag(*dense_kfac(model, X).values())
    else:
        S = dense_jacobian(model, X)[1][:, 0].square().sum(0).diag()
    return (S + l2 * torch.eye(len(S), dtype=torch.float64)).numpy()


def counts(phi, e, phi_new, H, r, score, residuals):
    """How many rows score at least as high as the new one at the label f + r, by definition: one pair per tail.

    Residuals and leverages after the new row are those of H + phi_new phi_new^T; a score that does not exist is at
    least as high as any, and so is a signed one that grows at least as fast as the new one's.
    """
    before, after = np.linalg.inv(H), np.linalg.inv(H + np.outer(phi_new, phi_new))
    slope_new = 1 / (1 + phi_new @ before @ phi_new)
    slope = phi @ before @ phi_new * slope_new
    residual, new = e - slope * r, slope_new * r
    gap = 1 - np.einsum("nd,de,ne->n", phi, after, phi)
    gap_new = 1 - phi_new @ after @ phi_new
    exists = (gap > 0) | (score == "standard")
    with np.errstate(invalid="ignore", divide="ignore"):
        u, u_new = {"standard": (1, 1), "deleted": (gap, gap_new), "studentized": (gap**0.5, gap_new**0.5)}[score]
        train, new = residual / u, new / u_new
        whole = ~exists | ((residuals == "signed") & (slope_new / u_new + slope / u <= 0))
    if residuals == "absolute":
        train, new = np.abs(train), np.abs(new)
    clear = not (np.abs(train - new)[~whole] < 1e-9 * (1 + abs(new))).any()
    tails = [train >= new] if residuals == "absolute" else [train >= new, train <= new]
    return [int((tail | whole).sum()) for tail in tails], clear, int((~exists).sum())


@pytest.mark.parametrize("curvature", ["kfac", "diagonal"])
@pytest.mark.parametrize("score", ["standard", "deleted", "studentized"])
@pytest.mark.parametrize("residuals", ["absolute", "signed"])
def test_sets_by_definition(curvature, score, residuals):
    model, X, y = problem()
    l2 = 0.3
    cp = fullcp.FullConformalRegressor(model, curvature=curvature, score=score, residuals=residuals, l2=l2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fullcp.MissingScoreWarning)
        cp.conformalize(X, y)
    (f, phi), H = dense_jacobian(model, X), dense_H(model, X, curvature, l2)
    e = y.numpy() - f[:, 0].numpy()
    phi = phi[:, 0].numpy()
    absent = 0
    for x_new in torch.cat([torch.randn(3, 3), 4 * torch.randn(3, 3), X[:1]]).double():
        f_new, phi_new = (t[0, 0].numpy() for t in dense_jacobian(model, x_new[None]))
        labels = f_new + np.concatenate([np.linspace(-6, 6, 97), [-100.0, 100.0, -1e4, 1e4]]) + 1e-3
        p = cp.p_value(x_new.expand(len(labels), 3), labels)
        pieces = {level: cp.predict_set(x_new[None], level)[0] for level in LEVELS}
        for label, found in zip(labels, p):
            tails, clear, missing = counts(phi, e, phi_new, H, label - f_new, score, residuals)
            absent = max(absent, missing)
            if not clear:
                continue
            factor = 41 if residuals == "absolute" else 41 / 2
            assert found == pytest.approx(min(1.0, (1 + min(tails)) / factor))
            for level in LEVELS:
                inside = any(low <= label <= high for low, high in pieces[level])
                assert inside == (min(tails) >= need(level, 40, residuals))
        assert all(a[1] < b[0] for level in LEVELS for a, b in itertools.pairwise(pieces[level]))
    assert absent > 0 or score == "standard"  # the case is met
