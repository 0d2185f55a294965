"""Low-rank curvature beyond the contract: the Nystrom formula, its bounds, growing ranks, exact solves, tuning."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fullcp
from fullcp.curvature import (
    expand_l2,
    fit_curvature,
    jacobian_for,
    low_rank_factor,
    low_rank_ranks,
    read_structure,
    restore,
)
from fullcp.curvature.full import fit_full
from fullcp.curvature.nystrom import LowRank, basis
from fullcp.features import FeatureRows, gram_block_product
from fullcp.tuning import evidence_of, tune
from reference import dense_jacobian, dense_low_rank, log_marginal_likelihood


def problem(rows=60, hidden=6, outputs=1, seed=0, memory=10**8, dtype=torch.float64):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, hidden), nn.Tanh(), nn.Linear(hidden, outputs)).to(dtype)
    X = torch.randn(rows, 3, dtype=torch.float64).to(dtype)
    return model, X, FeatureRows(jacobian_for("low_rank", model, X), X, memory=memory)


def smooth(rows=300, hidden=40, memory=10**8):
    """A network with D = 5 hidden + 1 whose spectrum falls fast."""
    return problem(rows, hidden, memory=memory)


def fit(features, curvature, l2, **arguments):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fullcp.LowRankWarning)
        return fit_curvature(features, curvature, l2, **arguments)


def flat_phi(features):
    return torch.cat([phi for _, phi in features.chunks()]).flatten(0, 1).double()  # (N O, D)


def penalty_of(kind, features, generator):
    sizes = [p.numel() for p in features.jacobian.parameters.values()]
    draws = {"scalar": 1, "layer": len(sizes), "parameter": sum(sizes)}[kind]
    return torch.exp(4 * torch.rand(draws, generator=generator, dtype=torch.float64) - 2)


def dense_H_k(curvature):
    root = curvature.diagonal.sqrt()
    S = curvature.U * curvature.eigenvalues @ curvature.U.T
    return root.unsqueeze(1) * (S + torch.eye(len(root), dtype=torch.float64)) * root


class TestNystrom:
    def matrix(self, size=12, rank=12, decay=0.5):
        torch.manual_seed(0)
        U = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64))[0][:, :rank]
        return U * decay ** torch.arange(rank) @ U.T

    def dense(self, approximation):
        return approximation.vectors * approximation.eigenvalues @ approximation.vectors.T

    def approximate(self, S, rank, known=None):
        product = S.__matmul__
        known = S.new_empty(len(S), 0) if known is None else known
        return LowRank.of_products(product, basis(product, known, rank))

    @pytest.mark.parametrize("rank", [1, 3, 7, 12, 40])
    def test_is_its_formula(self, rank):
        S = self.matrix()
        found = self.approximate(S, min(rank, 12))
        torch.testing.assert_close(self.dense(found), dense_low_rank(S, rank), rtol=0, atol=1e-13)
        eye = torch.eye(len(found.eigenvalues), dtype=torch.float64)
        torch.testing.assert_close(found.vectors.T @ found.vectors, eye, rtol=0, atol=1e-13)
        assert (found.eigenvalues.diff() <= 0).all()

    def test_is_exact_from_the_rank_of_the_matrix_on_and_keeps_no_more(self):
        S = self.matrix(rank=4)
        for rank in (4, 6, 12):
            found = self.approximate(S, rank)
            assert len(found.eigenvalues) == 4
            torch.testing.assert_close(self.dense(found), S, rtol=0, atol=1e-14)
        assert len(self.approximate(S, 3).eigenvalues) == 3

    def test_nothing_is_nothing(self):
        assert self.approximate(torch.zeros(5, 5, dtype=torch.float64), 3).vectors.shape == (5, 0)

    @pytest.mark.parametrize("rank", [2, 5, 9, 12])
    def test_basis_holds_what_is_known(self, rank):
        S = self.matrix()
        known = self.approximate(S, 5).vectors
        Q = basis(S.__matmul__, known, rank)
        torch.testing.assert_close(Q.T @ Q, torch.eye(rank, dtype=torch.float64), rtol=0, atol=1e-13)
        if rank >= 5:
            torch.testing.assert_close(Q @ (Q.T @ known), known, rtol=0, atol=1e-13)
        grown = self.approximate(S, rank, known)
        assert torch.trace(S - self.dense(grown)) <= 2 * torch.linalg.eigvalsh(S)[: 12 - rank].sum() + 1e-13


@settings(max_examples=60)
@given(
    rows=st.integers(2, 30),
    hidden=st.integers(1, 10),
    outputs=st.integers(1, 3),
    kind=st.sampled_from(["scalar", "layer", "parameter"]),
    share=st.floats(0.05, 1.0),
    seed=st.integers(0, 10**6),
)
def test_leverages_are_bounded_from_both_sides_and_exact_at_full_rank(rows, hidden, outputs, kind, share, seed):
    model, X, features = problem(rows, hidden, outputs, seed)
    l2 = penalty_of(kind, features, torch.Generator().manual_seed(seed))
    most = min(features.size, rows * outputs)
    rank = max(1, round(share * most))
    curvature, exact = fit(features, f"low_rank:{rank}", l2), fit_full(features, l2)
    phi = features.jacobian(torch.cat([X, 3 * torch.randn(5, 3, dtype=torch.float64)]))[1]
    V_k, V = curvature.leverage(phi), exact.leverage(phi)
    h_k, h = V_k.diagonal(dim1=1, dim2=2), V.diagonal(dim1=1, dim2=2)
    assert (h_k - h >= -1e-9 * (1 + h)).all()
    assert (h_k - h <= curvature.over_estimate(phi) + 1e-9 * (1 + h)).all()
    assert (curvature.over_estimate(phi) <= h_k).all()
    P = flat_phi(features)
    H = P.T @ P + torch.diag(expand_l2(l2, features.jacobian.parameters, X.device))
    gap = torch.linalg.eigvalsh(H - dense_H_k(curvature))
    assert gap[0] >= -1e-12 * torch.linalg.eigvalsh(H)[-1]
    if rank == most:
        torch.testing.assert_close(V_k, V, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(curvature.slack(), exact.slack(), rtol=1e-6, atol=1e-6)
        query, expected = curvature.query(phi), exact.query(phi)
        whole = slice(0, rows)
        torch.testing.assert_close(query.cross(whole), expected.cross(whole), rtol=1e-6, atol=1e-6)


def test_the_error_is_that_of_the_rows_looked_at():
    """With no more rows than the sample, all of them: bounds against the truth, and what is derived of them."""
    _, X, features = problem(rows=25, hidden=12)
    curvature, exact = fit(features, "low_rank:8", 0.3), fit_full(features, 0.3)
    phi = features.jacobian(X)[1]
    h, h_k = exact.leverage(phi)[:, 0, 0], curvature.leverage(phi)[:, 0, 0]
    P, eye = flat_phi(features), torch.eye(features.size, dtype=torch.float64)
    u = torch.linalg.solve(dense_H_k(curvature), P.T)
    b = ((P.T @ P + 0.3 * eye - dense_H_k(curvature)) @ u * u).sum(0)
    over = h_k - h_k**2 / (h_k + b)
    torch.testing.assert_close(curvature.over_estimate(phi)[:, 0], over, rtol=1e-8, atol=1e-12)
    assert curvature.error.largest == pytest.approx((over / h_k).max().item(), rel=1e-8)
    assert curvature.error.mean == pytest.approx((over / h_k).mean().item(), rel=1e-8)
    assert curvature.error.largest >= ((h_k - h) / h_k).max()
    assert curvature.error.mean >= ((h_k - h) / h_k).mean()
    lost = torch.where(h_k < 1, over / (1 - h_k + over), 1.0)
    assert curvature.error.slack == pytest.approx(lost.mean().item(), rel=1e-8)
    assert curvature.error.slack >= ((h_k - h) / (1 - h)).clamp(max=1).mean()


@pytest.mark.parametrize("curvature", ["low_rank:20", "low_rank"])
def test_rows_in_another_order_or_other_chunks_give_the_same(curvature):
    _, X, features = smooth()
    expected = fit(features, curvature, 0.1)
    phi = features.jacobian(X[:9] + 0.2)[1]
    order = torch.randperm(len(X))
    for rows, memory in ((X[order], 10**8), (X, 4 * 10**6), (X[order], 4 * 10**6)):
        found = fit(FeatureRows(features.jacobian, rows, memory=memory), curvature, 0.1)
        assert found.name == expected.name
        torch.testing.assert_close(found.leverage(phi), expected.leverage(phi), rtol=1e-8, atol=0)
        assert found.error.mean == pytest.approx(expected.error.mean, rel=1e-6)


class TestRank:
    def test_grows_until_leverages_are_known(self):
        _, X, features = smooth()
        curvature, exact = fit_curvature(features, "low_rank", 1e-3), fit_full(features, 1e-3)
        assert curvature.rank == 128 < features.size
        assert not fit(features, "low_rank:64", 1e-3).error.is_small
        assert curvature.error.is_small
        phi = features.jacobian(X[::7] + 0.5)[1]
        torch.testing.assert_close(curvature.leverage(phi), exact.leverage(phi), rtol=0.01, atol=0)
        assert fit_curvature(features, "low_rank", 1e3).rank == 64

    def test_stays_within_the_budget_and_says_so(self):
        _, _, features = smooth(memory=20 * 4 * 8 * 201)  # too little to look at more than one row
        with pytest.warns(
            fullcp.LowRankWarning,
            match=r"of rank 20 .* at worst of 1 row\), .* memory='1GB' allows rank 40, .* twice the time",
        ):
            assert fit_curvature(features, "low_rank", 0.1).rank == 20

    def test_one_that_is_given_is_kept_and_the_next_one_named(self):
        _, _, features = smooth()
        with pytest.warns(fullcp.LowRankWarning, match=r"curvature='low_rank:60' allows rank 60, whose .* MB"):
            assert fit_curvature(features, "low_rank:30", 1e-3).rank == 30

    def test_no_warning_where_it_is_good(self):
        _, _, features = smooth()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fit_curvature(features, "low_rank:120", 0.1)
            fit_curvature(features, "low_rank", 0.1)

    @pytest.mark.parametrize(
        ("top", "ranks"), [(1, [1]), (64, [64]), (90, [90]), (100, [64, 100]), (270, [64, 128, 270])]
    )
    def test_double_up_to_the_budget(self, top, ranks):
        _, _, features = smooth()
        features.size = 300
        features.memory = top * 4 * 8 * 300
        assert low_rank_ranks(features) == ranks

    def test_the_smaller_of_rows_and_parameters_is_enough(self):
        for rows, hidden, outputs in ((10, 12, 1), (5, 12, 2), (90, 4, 1)):
            _, _, features = problem(rows, hidden, outputs)
            assert low_rank_ranks(features, 500) == [min(features.size, rows * outputs)]
            assert low_rank_ranks(features) == [min(features.size, rows * outputs)]

    def test_one_beyond_the_budget_is_refused(self):
        _, _, features = smooth(memory=10**6)
        features.memory = 10**5
        with pytest.raises(ValueError, match=r"'low_rank:150' needs .* factor of 201 x 150 numbers, memory is 0.1 MB"):
            fit_curvature(features, "low_rank:150", 0.1)

    @pytest.mark.parametrize(
        "word", ["low_rank:", "low_rank:0", "low_rank:-3", "low_rank:2.5", "low_rank: 5", "low_rank:x"]
    )
    def test_bad_ones_are_refused(self, word):
        with pytest.raises(ValueError, match=f"curvature must have a whole number .* 'low_rank:200', got '{word}'"):
            read_structure(word)

    @pytest.mark.parametrize("word", ["kfac:3", "lowrank", "low_rank200", 7, None])
    def test_other_words_are_refused(self, word):
        with pytest.raises(ValueError, match=r"curvature must be one of 'auto', .*'low_rank', got"):
            read_structure(word)


class TestExact:
    @pytest.mark.parametrize("outputs", [1, 3])
    @pytest.mark.parametrize("kind", ["scalar", "layer", "parameter"])
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    def test_is_full_curvature(self, outputs, kind, dtype):
        _, X, features = problem(40, 9, outputs, dtype=dtype)
        l2 = penalty_of(kind, features, torch.Generator().manual_seed(1))
        curvature, full = fit(features, "low_rank:11", l2), fit_full(features, l2)
        phi = features.jacobian(torch.cat([X[:4], 3 * torch.randn(5, 3).to(dtype)]))[1]
        assert (curvature.leverage(phi) - full.leverage(phi)).abs().max() > 1e-4
        torch.testing.assert_close(curvature.exact_leverage(phi), full.leverage(phi), rtol=1e-8, atol=1e-8)
        vectors = torch.randn(features.size, 3, dtype=torch.float64)
        torch.testing.assert_close(curvature.exact_solve(vectors), full.solve(vectors), rtol=1e-7, atol=1e-7)
        torch.testing.assert_close(
            curvature.exact_solve(vectors[:, 0]), full.solve(vectors[:, 0]), rtol=1e-7, atol=1e-7
        )

    def test_in_small_portions(self):
        _, X, features = problem(40, 9)
        curvature = fit(features, "low_rank:11", 0.3)
        phi = features.jacobian(X)[1]
        expected = fit_full(features, 0.3).leverage(phi)
        features.memory = 10**5
        torch.testing.assert_close(curvature.exact_leverage(phi), expected, rtol=1e-8, atol=1e-8)
        nothing = torch.zeros(features.size, 2, dtype=torch.float64)
        assert torch.equal(curvature.exact_solve(nothing), nothing)

    def test_one_cut_short_is_told(self, monkeypatch):
        monkeypatch.setattr("fullcp.curvature.ridge._MOST_STEPS", 1)
        _, X, features = problem(40, 9)
        curvature = fit(features, "low_rank:5", 0.01)
        with pytest.warns(fullcp.RefinementWarning, match="exact solves came within .* 1e-09 was wanted"):
            curvature.exact_leverage(features.jacobian(X)[1])

    def test_needs_the_rows(self):
        model, X, features = problem()
        curvature = fit(features, "low_rank:5", 0.3, cross=False)
        assert not features.holds
        restored = restore(FeatureRows(features.jacobian, X[:0], memory=10**8), curvature.state())
        phi = features.jacobian(X)[1]
        assert torch.equal(restored.leverage(phi), curvature.leverage(phi))
        for ask in (restored.exact_leverage, restored.over_estimate):
            with pytest.raises(ValueError, match="needs the training rows, which were not saved"):
                ask(phi)


class TestRefusals:
    def test_a_parameter_without_penalty(self):
        _, _, features = problem()
        with pytest.raises(ValueError, match="l2 must be positive everywhere with curvature='low_rank', entry 18 is 0"):
            fit_curvature(features, "low_rank", [1.0, 0.0, 1.0, 1.0])

    def test_a_penalty_lost_in_rounding(self):
        _, _, features = problem()
        with pytest.raises(fullcp.NotPositiveDefiniteError, match=r"at its smallest, 1e-15, .* float64; raise it"):
            fit_curvature(features, "low_rank", [1.0, 1.0, 1e-15, 1.0])


@pytest.mark.parametrize("outputs", [1, 2])
def test_products_of_blocks(outputs):
    _, X, features = problem(outputs=outputs, memory=3 * 10**4)
    P = flat_phi(features)
    V = torch.randn(features.size, 5, dtype=torch.float64)
    assert len(features.slices()) > 1
    torch.testing.assert_close(gram_block_product(features)(V), P.T @ (P @ V), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gram_block_product(features)(V.T.contiguous().T), P.T @ (P @ V), rtol=1e-10, atol=1e-10)
    small = FeatureRows(features.jacobian, X, memory=8 * features.jacobian.bytes_per_row() - 8)  # not a row of phi fits
    small.chunks = None
    torch.testing.assert_close(gram_block_product(small)(V), P.T @ (P @ V), rtol=1e-9, atol=1e-9)


class TestTuning:
    def problem(self, rows=50, hidden=8, outputs=1):
        model, X, features = problem(rows, hidden, outputs)
        e = 0.6 * torch.randn(rows, outputs, dtype=torch.float64)
        return model, X, features, e

    def at(self, evidence, log_precision, log_variance):
        return evidence(torch.full((1, evidence.groups), log_precision).double(), torch.tensor([log_variance]).double())

    @pytest.mark.parametrize("structure", ["scalar", "layer"])
    @pytest.mark.parametrize("outputs", [1, 2])
    def test_is_a_lower_bound_that_closes_at_full_rank(self, structure, outputs):
        _, _, features, e = self.problem(outputs=outputs)
        exact = evidence_of(features, e, structure)
        for log_precision, log_variance in ((0.0, 0.0), (-2.0, -1.0), (2.0, 1.0), (-3.0, 0.5)):
            expected = self.at(exact, log_precision, log_variance)
            gaps = []
            for rank in (1, 4, 12, 30, 200):
                features.kept.clear()
                evidence = evidence_of(features, e, structure, f"low_rank:{rank}")
                found = self.at(evidence, log_precision, log_variance)
                without_rest = evidence.form.form.log_det(torch.full((1, evidence.groups), 0.5).double())
                assert without_rest <= exact.form.log_det(torch.full((1, evidence.groups), 0.5).double()) + 1e-9
                gaps.append((expected.value - found.value).item())
            assert all(gap > -1e-8 for gap in gaps)
            assert gaps[0] > 1e-3
            assert gaps == sorted(gaps, reverse=True)
            assert gaps[-1] == pytest.approx(0, abs=1e-8)
            torch.testing.assert_close(found.in_log_precision, expected.in_log_precision, rtol=1e-7, atol=1e-8)

    def test_gradient_is_that_of_the_value(self):
        _, _, features, e = self.problem()
        evidence = evidence_of(features, e, "layer", "low_rank:6")
        x, v, step = torch.tensor([[0.3, -1.0, 2.0, 0.5]]).double(), torch.tensor([-0.7]).double(), 1e-5
        found = evidence(x, v)
        for g in range(4):
            shift = step * torch.eye(4, dtype=torch.float64)[g]
            difference = (evidence.value(x + shift, v) - evidence.value(x - shift, v)) / (2 * step)
            torch.testing.assert_close(found.in_log_precision[:, g], difference, rtol=1e-6, atol=1e-6)
        difference = (evidence.value(x, v + step) - evidence.value(x, v - step)) / (2 * step)
        torch.testing.assert_close(found.in_log_variance, difference, rtol=1e-6, atol=1e-6)

    @pytest.mark.parametrize("structure", ["scalar", "layer"])
    def test_finds_what_full_curvature_finds(self, structure):
        torch.manual_seed(0)
        _, X, features = smooth()
        e = 0.3 * torch.randn(len(X), 1, dtype=torch.float64)
        expected = tune(features, e, structure=structure)
        found = tune(features, e, structure=structure, curvature="low_rank")
        assert found.structure == structure
        assert features.kept["low_rank"].shape[1] < features.size
        np.testing.assert_allclose(found.l2, expected.l2, rtol=0.02)
        assert found.log_marginal_likelihood <= expected.log_marginal_likelihood + 1e-6
        assert found.log_marginal_likelihood == pytest.approx(expected.log_marginal_likelihood, abs=0.1)

    def test_no_group_is_left_without_a_penalty_where_the_rank_misses_it(self):
        """A tensor of small gradients, which no vector of a rank of 2 sees."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 6), nn.Linear(6, 1)).double()
        X, e = torch.randn(60, 3, dtype=torch.float64), torch.randn(60, 1, dtype=torch.float64)
        with torch.no_grad():
            model[1].weight *= 1e-2
        features = FeatureRows(jacobian_for("low_rank", model, X), X, memory=10**8)
        full, found = (tune(features, e, structure="layer", curvature=word) for word in ("full", "low_rank:2"))
        assert (found.l2 > 0.1 * full.l2).all()

    def test_predictors_use_it(self):
        model, X, features, e = self.problem()
        y = model(X).detach() + e
        cp = fullcp.FullConformalRegressor(model, "low_rank:12").conformalize(X, y)
        plain = fullcp.FullConformalRegressor(model, "low_rank:12", l2=cp.tuning_.l2).conformalize(X, y)
        assert cp.tuning_.structure == "layer"
        assert cp.curvature_.rank == plain.curvature_.rank == 12
        # Subspace iteration started from the tuning's factor in the one and anew in the other.
        assert cp.curvature_.error.mean <= 2 * plain.curvature_.error.mean
        assert not cp._features.kept
        best = evidence_of(features, e, "layer", "low_rank:12")
        precision = torch.from_numpy(np.log(cp.tuning_.l2 / cp.tuning_.noise**2)).reshape(1, -1)
        there = best(precision, torch.tensor([2 * np.log(cp.tuning_.noise)]))
        assert there.value.item() == pytest.approx(cp.tuning_.log_marginal_likelihood, rel=1e-9)

    def test_the_factor_is_that_of_S(self):
        model, X, features, _ = self.problem()
        phi = dense_jacobian(model, X)[1].flatten(0, 1)
        S = phi.T @ phi
        B = low_rank_factor(features, 10)
        torch.testing.assert_close(B @ B.T, dense_low_rank(S, 10), rtol=1e-9, atol=1e-9)
        more = low_rank_factor(features, 20)
        assert torch.trace(S - more @ more.T) < torch.trace(S - B @ B.T)
        assert torch.linalg.eigvalsh(S - more @ more.T)[0] > -1e-10 * torch.trace(S)


def test_intervals_come_near_to_those_of_full_curvature():
    model, X, _ = smooth()
    torch.manual_seed(1)
    y = model(X)[:, 0].detach() + 0.3 * torch.randn(len(X), dtype=torch.float64)
    x = torch.randn(20, 3, dtype=torch.float64)

    def intervals(curvature):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", fullcp.LowRankWarning)
            warnings.simplefilter("ignore", fullcp.MissingScoreWarning)
            cp = fullcp.FullConformalRegressor(model, curvature, "studentized", l2=0.1).conformalize(X, y)
        return cp.predict_interval(x, 0.9).intervals

    exact = intervals("full")
    gaps = [(intervals(f"low_rank:{rank}") - exact).abs().max().item() for rank in (25, 100, 201)]
    assert gaps[0] > 10 * gaps[1]
    assert gaps[1] < 0.01
    assert gaps[2] < 1e-8


def test_log_marginal_likelihood_is_below_the_dense_formula():
    torch.manual_seed(0)
    model, X, features = problem(40, 7)
    e = torch.randn(40, 1, dtype=torch.float64)
    phi = dense_jacobian(model, X)[1].flatten(0, 1)
    theta = torch.cat([p.detach().flatten() for p in model.parameters()])
    d = torch.full_like(theta, 0.4)
    expected = log_marginal_likelihood(phi, e.flatten(), theta, d, torch.tensor(0.8).double())
    arguments = torch.tensor([[np.log(0.4)]]), torch.tensor([np.log(0.8)])
    lower = [evidence_of(features, e, "scalar", f"low_rank:{rank}")(*arguments).value for rank in (3, 36)]
    assert lower[0] < expected - 1e-3
    torch.testing.assert_close(lower[1][0], expected)
