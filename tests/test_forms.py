"""log det H, gamma and its slope of each form against dense algebra, finite differences, and one network at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fullcp.curvature import NotPositiveDefiniteError
from fullcp.tuning import Evidence, Gram, Kernels, Repeated, Spectral, WithRest, posthoc

SIZES = [5, 1, 3]


def gradients(networks, rows, sizes):
    return torch.randn(networks, rows, sum(sizes), dtype=torch.float64)


def gram(networks, rows):
    S = (phi := gradients(networks, rows, SIZES)).mT @ phi
    return Gram(S, SIZES), S, SIZES


def kernels(networks, rows):
    phi = gradients(networks, rows, SIZES)
    K = torch.stack([P @ P.mT for P in torch.split(phi, SIZES, 2)], 1)
    return Kernels(K, SIZES), phi.mT @ phi, SIZES


def spectral_of_one_group(networks, rows):
    S = (phi := gradients(networks, rows, SIZES)).mT @ phi
    return Spectral(torch.linalg.eigvalsh(S), torch.zeros(9, dtype=torch.long), [9]), S, [9]


def spectral_of_kernel(networks, rows):
    """The eigenvalues of the kernel: the others of S are 0."""
    phi = gradients(networks, rows % 9 + 1, SIZES)
    group = torch.zeros(phi.shape[1], dtype=torch.long)
    return Spectral(torch.linalg.eigvalsh(phi @ phi.mT), group, [9]), phi.mT @ phi, [9]


def spectral_of_blocks(networks, rows):
    """A Kronecker product, whose eigenvalues are products, and a block of its own, in groups of different sizes."""
    X, Y, Z = (gradients(networks, rows, [size]) for size in (2, 3, 4))
    left, right, block = X.mT @ X, Y.mT @ Y, Z.mT @ Z
    S = torch.stack([torch.block_diag(torch.kron(p, q), r) for p, q, r in zip(left, right, block)])
    p, q, r = (torch.linalg.eigvalsh(M) for M in (left, right, block))
    products = (p.unsqueeze(2) * q.unsqueeze(1)).flatten(1)
    return Spectral(torch.cat([products, r], 1), torch.tensor([0] * 6 + [1] * 4), [6, 4]), S, [6, 4]


def repeated(networks, rows):
    """Three outputs, each with 4 weights and a bias: groups are the weights of all and the biases of all."""
    S = (phi := gradients(networks, rows, [5])).mT @ phi
    whole = torch.zeros(networks, 15, 15, dtype=torch.float64)
    for o in range(3):
        weights, bias = torch.arange(4 * o, 4 * o + 4), torch.tensor([12 + o])
        at = torch.cat([weights, bias])
        whole[:, at.unsqueeze(1), at] = S
    return Repeated(Gram(S, [4, 1]), 3), whole, [12, 3]


def with_rest(networks, rows):
    """A rest for which the bound is attained: of equal eigenvalues, in groups that the known part leaves alone."""
    S = torch.zeros(networks, 9, 9, dtype=torch.float64)
    phi = gradients(networks, rows, [5])
    S[:, :5, :5] = phi.mT @ phi
    rest = torch.rand(networks, 1, dtype=torch.float64) * torch.tensor([0.0] * 5 + [2.0] + [0.7] * 3)
    traces = torch.stack([part.sum(1) for part in torch.split(rest, SIZES, 1)], 1)
    return WithRest(Gram(S, SIZES), traces, torch.tensor([4, 1, 3])), S + torch.diag_embed(rest), SIZES


CASES = [gram, kernels, spectral_of_one_group, spectral_of_kernel, spectral_of_blocks, repeated, with_rest]
case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)


def dense(S, sizes, l2):
    """Log det H and gamma as they are written."""
    H = S + torch.diag_embed(torch.repeat_interleave(l2, torch.tensor(sizes), 1))
    traces = [part.sum(1) for part in torch.split(torch.linalg.inv(H).diagonal(dim1=1, dim2=2), sizes, 1)]
    return torch.linalg.slogdet(H)[1], torch.tensor(sizes) - l2 * torch.stack(traces, 1)


def penalties(networks, groups):
    return torch.exp(torch.empty(networks, groups, dtype=torch.float64).uniform_(-4, 3))


@case
@settings(max_examples=25)
@given(networks=st.integers(1, 3), rows=st.integers(1, 20), seed=st.integers(0, 10**6))
def test_determinant_and_slope(case, networks, rows, seed):
    torch.manual_seed(seed)
    form, S, sizes = case(networks, rows)
    l2 = penalties(networks, len(sizes))
    log_det, gamma = form.determinant(l2)
    expected_log_det, expected_gamma = dense(S, sizes, l2)
    torch.testing.assert_close(log_det, expected_log_det, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gamma, expected_gamma, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(form.log_det(l2), log_det, rtol=1e-12, atol=1e-12)
    assert form.sizes.tolist() == sizes
    again, J = form.slope(l2)
    torch.testing.assert_close(again, gamma, rtol=1e-9, atol=1e-11)
    step = 1e-5
    for k in range(len(sizes)):
        shift = torch.zeros(len(sizes), dtype=torch.float64)
        shift[k] = step
        up, down = form.determinant(l2 * shift.exp()), form.determinant(l2 * (-shift).exp())
        torch.testing.assert_close((up[1] - down[1]) / (2 * step), J[:, :, k], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close((up[0] - down[0]) / (2 * step), sizes[k] - gamma[:, k], rtol=1e-5, atol=1e-7)


@case
def test_slope_in_precisions_and_noise_is_that_in_l2(case):
    """gamma of A = S / v + diag(d): d gamma_g / d log d_k = J_gk, and in log v the sum of J_gk over k."""
    torch.manual_seed(0)
    form, S, sizes = case(2, 12)
    d, v = penalties(2, len(sizes)), penalties(2, 1)
    J = form.slope(v * d)[1]

    def gamma(d, v):
        return dense(S / v.unsqueeze(2), sizes, d)[1]

    step = 1e-5
    in_log_v = (gamma(d, v * (1 + step)) - gamma(d, v * (1 - step))) / (2 * step)
    torch.testing.assert_close(in_log_v, J.sum(2), rtol=1e-5, atol=1e-7)
    for k in range(len(sizes)):
        shift = torch.zeros(len(sizes), dtype=torch.float64)
        shift[k] = step
        difference = (gamma(d * (1 + shift), v) - gamma(d * (1 - shift), v)) / (2 * step)
        torch.testing.assert_close(difference, J[:, :, k], rtol=1e-5, atol=1e-7)


@case
def test_a_batch_is_its_networks_one_by_one(case):
    torch.manual_seed(0)
    form, _, sizes = case(4, 12)
    l2 = penalties(4, len(sizes))
    whole = (*form.determinant(l2), *form.slope(l2))
    for b in range(4):
        torch.manual_seed(0)
        same = case(4, 12)[0]
        for part in (same, getattr(same, "form", same)):
            for name in ("S", "K", "eigenvalues", "each"):
                if hasattr(part, name) and len(getattr(part, name)) > 1:
                    setattr(part, name, getattr(part, name)[b : b + 1])
        alone = (*same.determinant(l2[b : b + 1]), *same.slope(l2[b : b + 1]))
        for found, expected in zip(whole, alone):
            torch.testing.assert_close(found[b : b + 1], expected, rtol=1e-12, atol=1e-12)


@settings(max_examples=40)
@given(rows=st.integers(1, 14), kept=st.integers(0, 9), seed=st.integers(0, 10**6))
def test_a_rest_is_bounded_from_above(rows, kept, seed):
    """Whatever rows are left out: log det H lies between that of the known part and that with the rest."""
    torch.manual_seed(seed)
    phi = gradients(2, rows, SIZES)
    known, rest = phi[:, :kept], phi[:, kept:]
    traces = torch.stack([part.square().sum((1, 2)) for part in torch.split(rest, SIZES, 2)], 1)
    form = Gram(known.mT @ known, SIZES)
    whole = WithRest(form, traces, torch.tensor(SIZES).clamp(max=rest.shape[1]))
    l2 = penalties(2, 3)
    expected = dense(phi.mT @ phi, SIZES, l2)[0]
    assert (form.log_det(l2) <= expected + 1e-9).all()
    assert (whole.log_det(l2) >= expected - 1e-9).all()
    small = WithRest(form, 1e-7 * traces, whole.ranks).log_det(l2) - form.log_det(l2)
    torch.testing.assert_close(small, 1e-7 * (traces / l2).sum(1), rtol=1e-3, atol=1e-12)


def test_rows_that_are_not_there_change_nothing():
    torch.manual_seed(0)
    phi = gradients(1, 6, SIZES)
    padded = torch.zeros(1, 9, 9, dtype=torch.float64)
    padded[:, [0, 2, 3, 4, 7, 8]] = phi
    l2 = penalties(1, 3)

    def kernels_of(rows):
        return Kernels(torch.stack([P @ P.mT for P in torch.split(rows, SIZES, 2)], 1), SIZES)

    few, many = kernels_of(phi), kernels_of(padded)
    for found, expected in zip((*many.determinant(l2), *many.slope(l2)), (*few.determinant(l2), *few.slope(l2))):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ask", ["log_det", "determinant", "slope"])
def test_a_matrix_that_cannot_be_factorised_harms_no_other(ask):
    torch.manual_seed(0)
    phi = 1e3 * gradients(3, 4, SIZES)
    l2 = penalties(3, 3)
    S = phi.mT @ phi
    K = torch.stack([P @ P.mT for P in torch.split(phi, SIZES, 2)], 1)
    bad = l2.clone()
    bad[1] = 1e-30
    broken = S.clone()
    broken[1, 0, 0] = torch.inf
    for form, at, whole in (
        (Gram(S, SIZES), bad, Gram(S, SIZES)),
        (Gram(broken, SIZES), l2, Gram(S, SIZES)),
        (Kernels(K.index_fill(0, torch.tensor(1), torch.nan), SIZES), l2, Kernels(K, SIZES)),
    ):
        results = (getattr(form, ask)(at), getattr(whole, ask)(l2))
        parts, expected = ([found] if isinstance(found, torch.Tensor) else found for found in results)
        for found, right in zip(parts, expected):
            assert not found[1].isfinite().any()
            assert torch.equal(found[[0, 2]], right[[0, 2]])


def test_a_search_without_a_value_says_which_l2_is_to_blame():
    S = torch.tensor([[1.0, 1.0], [1.0, 1.0 - 1e-9]], dtype=torch.float64)  # by rounding not even semidefinite
    evidence = Evidence(Gram(1e10 * S[None], [1, 1]), torch.ones(1, 2), torch.ones(1), torch.full((1,), 9.0))
    message = r"the marginal likelihood has no value at l2 = noise\^2 x precision = \[0.111, 0.111\]: S \+ diag"
    with pytest.raises(NotPositiveDefiniteError, match=message):
        posthoc._maximise(evidence, torch.ones(9, 1, dtype=torch.float64), "layer")
