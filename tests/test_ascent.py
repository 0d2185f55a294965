"""The ascent in training: torch's Adam on the dense formula, and how little the expansion of gamma changes."""

from __future__ import annotations

from math import cos, pi

import pytest
import torch

from fullcp.tuning import Ascent, Spectral, evidence_of_many
from fullcp.tuning.evidence import BOUND, Evidence
from reference import log_marginal_likelihood

SIZES = [12, 4, 4, 1]
RATES = [1e-3 + (1e-2 - 1e-3) * (1 + cos(pi * k / 49)) / 2 for k in range(50)]


def problem(networks=3, rows=30, seed=0):
    """Gradients (B, n, 1, D), residuals and weights, in scales that differ between the groups."""
    torch.manual_seed(seed)
    scales = torch.repeat_interleave(torch.tensor([3.0, 1.0, 0.3, 2.0]).double(), torch.tensor(SIZES))
    phi = torch.randn(networks, rows, 1, sum(SIZES), dtype=torch.float64) * scales
    e = 0.3 * torch.randn(networks, rows, 1, dtype=torch.float64)
    return phi, e, torch.randn(networks, sum(SIZES), dtype=torch.float64)


def evidence(networks=3, rows=30, seed=0, at=slice(None), **arguments):
    phi, e, theta = (part[at] for part in problem(networks, rows, seed))
    return evidence_of_many([(phi, e)], theta, SIZES, torch.full((len(phi),), rows), **arguments)


def dense(phi, e, theta, at):
    """The formula at log d and log sigma, (5,)."""
    d = torch.repeat_interleave(at[:4].exp(), torch.tensor(SIZES))
    return log_marginal_likelihood(phi.flatten(0, 1), e.flatten(), theta, d, (2 * at[4]).exp())


def state_of(ascent):
    return torch.cat([ascent.log_precision, ascent.log_noise.unsqueeze(1)], 1)


@pytest.mark.parametrize("form", ["primal", "dual"])
def test_without_reach_it_is_adam_of_torch_on_the_dense_formula(form):
    phi, e, theta = problem()
    ascent = Ascent(3, 4, reach=0)
    values = torch.stack([ascent.climb(evidence(form=form), RATES) for _ in range(2)])
    for b in range(3):
        at = torch.zeros(5, dtype=torch.float64, requires_grad=True)  # log d, log sigma
        adam = torch.optim.Adam([at])
        for climb in range(2):
            for rate in RATES:
                adam.param_groups[0]["lr"] = rate
                adam.zero_grad()
                (-dense(phi[b], e[b], theta[b], at)).backward()
                adam.step()
            expected = dense(phi[b], e[b], theta[b], at.detach())
            torch.testing.assert_close(values[climb, b], expected, rtol=1e-9, atol=1e-8)
        torch.testing.assert_close(state_of(ascent)[b], at.detach(), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("form", ["primal", "dual"])
@pytest.mark.parametrize("rows", [12, 60])
def test_by_default_it_hardly_differs(form, rows):
    given = evidence(rows=rows, form=form)
    near, exact = Ascent(3, 4), Ascent(3, 4, reach=0)
    for _ in range(20):
        value, truth = near.climb(given, RATES), exact.climb(given, RATES)
        assert (state_of(near) - state_of(exact)).abs().max() < 2e-3
        torch.testing.assert_close(value, truth, rtol=1e-3, atol=1e-2)
        again = given(near.log_precision, 2 * near.log_noise).value
        torch.testing.assert_close(value, again, rtol=1e-12, atol=1e-10)  # exact where it is
    torch.testing.assert_close(near.l2.log(), exact.l2.log(), rtol=0, atol=2e-3)


def test_it_factorises_seldom():
    given = evidence(form="primal")
    calls = []
    slope = given.form.slope
    given.form.slope = lambda l2: calls.append(0) or slope(l2)
    given.form.determinant = None
    Ascent(3, 4).climb(given, RATES)
    assert len(calls) == 3


def test_it_climbs_to_the_maximum():
    given, ascent = evidence(), Ascent(3, 4)
    for _ in range(60):
        ascent.climb(given, RATES)
    found = given(ascent.log_precision, 2 * ascent.log_noise)
    assert found.in_log_precision.abs().max() < 1e-2
    assert found.in_log_variance.abs().max() < 1e-2


def test_what_is_exact_for_nothing_is_never_expanded():
    form = Spectral(torch.rand(2, 6).double(), torch.tensor([0, 0, 0, 1, 1, 1]), [4, 3])
    form.slope = None
    given = Evidence(form, torch.rand(2, 2).double(), torch.rand(2).double(), torch.tensor([5.0, 6.0]).double())
    near, exact = Ascent(2, 2, reach=10.0), Ascent(2, 2, reach=0)
    assert torch.equal(near.climb(given, RATES), exact.climb(given, RATES))


def test_a_batch_is_its_networks_one_by_one():
    whole = Ascent(3, 4)
    value = whole.climb(evidence(), RATES)
    for b in range(3):
        alone = Ascent(1, 4)
        torch.testing.assert_close(alone.climb(evidence(at=slice(b, b + 1)), RATES)[0], value[b])
        torch.testing.assert_close(state_of(alone)[0], state_of(whole)[b])


def test_networks_can_be_dropped():
    whole, few = Ascent(3, 4), Ascent(3, 4)
    for ascent in (whole, few):
        ascent.climb(evidence(), RATES)
    few.keep([2, 0])
    value = whole.climb(evidence(), RATES)
    torch.testing.assert_close(few.climb(evidence(at=[2, 0]), RATES), value[[2, 0]])
    torch.testing.assert_close(state_of(few), state_of(whole)[[2, 0]])


def test_it_goes_on_from_its_state():
    first = Ascent(3, 4)
    first.climb(evidence(), RATES)
    state = first.state()
    second = Ascent(3, 4)
    second.restore(state)
    expected = first.climb(evidence(), RATES)
    assert torch.equal(second.climb(evidence(), RATES), expected)
    assert torch.equal(state_of(second), state_of(first))
    third = Ascent(3, 4)
    third.restore(state)  # not touched by what came after
    assert torch.equal(third.climb(evidence(), RATES), expected)


def test_what_was_read_stays():
    ascent = Ascent(3, 4)
    before = ascent.log_precision
    ascent.climb(evidence(), RATES)
    assert torch.equal(before, torch.zeros(3, 4).double())


@pytest.mark.parametrize("form", ["primal", "dual"])
@pytest.mark.parametrize("structure", ["layer", "scalar"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e200])
def test_a_network_without_a_value_stays_where_it_is_and_harms_no_other(form, structure, value):
    groups = 4 if structure == "layer" else 1
    phi, e, theta = problem()
    broken = phi.clone()
    broken[1, 3, 0, 2] = value

    def given(phi):
        return evidence_of_many([(phi, e)], theta, SIZES, torch.full((3,), 30), structure=structure, form=form)

    ascent, whole = Ascent(3, groups), Ascent(3, groups)
    for other in (ascent, whole):
        other.climb(given(phi), RATES)
    before = ascent.state()
    found, expected = ascent.climb(given(broken), RATES), whole.climb(given(phi), RATES)
    assert found[1] == -torch.inf
    assert torch.equal(found[[0, 2]], expected[[0, 2]])
    for name, part in ascent.state().items():
        assert torch.equal(part[1], before[name][1])
        assert torch.equal(part[[0, 2]], whole.state()[name][[0, 2]])
    torch.testing.assert_close(ascent.climb(given(phi), RATES)[1:2], expected[1:2])  # and goes on from there


def test_it_stays_within_the_bounds_of_the_search_after_training():
    """Of residuals and weights that are all zero, noise falls and precisions rise for ever."""
    phi, _, _ = problem()
    given = evidence_of_many([(phi, torch.zeros(3, 30, 1))], torch.zeros(3, sum(SIZES)), SIZES, torch.full((3,), 30))
    ascent = Ascent(3, 4)
    for _ in range(40):
        assert ascent.climb(given, [1.0] * 5).isfinite().all()
    torch.testing.assert_close(ascent.log_precision, torch.full((3, 4), BOUND).double())
    torch.testing.assert_close(ascent.log_noise, torch.full((3,), -BOUND / 2).double())
