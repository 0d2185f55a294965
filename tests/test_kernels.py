"""Exact curvature without gradients: kernels from what layers see, against the explicit form and dense algebra."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fullcp
from fullcp.curvature import NotPositiveDefiniteError, expand_l2, fit_curvature, look_at, restore
from fullcp.curvature.full import fit_full
from fullcp.features import FeatureRows, Jacobian, KernelRows, factors, kernel_rows
from fullcp.features.factors import Factors, Whole, add_kernel
from fullcp.tuning import evidence_of, tune
from large_cases import LARGE, large
from reference import dense_jacobian

PLENTY, TINY = 10**9, 8000  # bytes: all rows in one block, and many blocks of a row or a few


def rows_of(model, X, memory=PLENTY):
    return FeatureRows(Jacobian(model, X), X, memory=memory)


def penalties(model):
    sizes = [p.numel() for p in model.parameters() if p.requires_grad]
    generator = torch.Generator().manual_seed(5)
    return {
        "scalar": 0.7,
        "layer": [0.3 * 1.5 ** (i % 5) for i in range(len(sizes))],
        "parameter": torch.rand(sum(sizes), generator=generator, dtype=torch.float64) + 0.1,
    }


def dense(model, X, X_new, l2):
    """Slack, leverages, cross leverages and H, from gradients of single rows."""
    phi, phi_new = dense_jacobian(model, X)[1], dense_jacobian(model, X_new)[1]
    flat = phi.flatten(0, 1)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    H = flat.T @ flat + torch.diag(expand_l2(l2, parameters, X.device))
    H_inv = torch.linalg.inv(H)
    found = {
        "slack": torch.eye(phi.shape[1], dtype=torch.float64) - torch.einsum("nod,de,npe->nop", phi, H_inv, phi),
        "leverage": torch.einsum("nod,de,npe->nop", phi_new, H_inv, phi_new),
        "cross": torch.einsum("nod,de,mpe->mnop", phi, H_inv, phi_new),
    }
    return found, H


def everything(curvature, features, x):
    query = curvature.query(x)
    cross = torch.cat([query.cross(rows) for rows in features.slices()], dim=1)
    assert torch.equal(curvature.leverage(x), query.leverage)
    return {"slack": curvature.slack(), "leverage": query.leverage, "cross": cross}


def assert_same(found, expected, tolerance=1e-8):
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=tolerance, atol=tolerance, msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.parametrize("memory", [PLENTY, TINY])
@pytest.mark.parametrize("kind", ["scalar", "layer", "parameter"])
@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("name", LARGE)
def test_equals_the_dense_inverse(name, outputs, kind, memory):
    model, X = large(name, 8, outputs)
    _, X_new = large(name, 4, outputs, seed=1)
    l2 = penalties(model)[kind]
    expected, _ = dense(model, X, 2 * X_new, l2)
    features = rows_of(model, X, memory)
    curvature = fit_full(features, l2, form="kernels")
    assert curvature.name == "full, kernels"
    assert len(curvature.rows.slices) == 1 if memory == PLENTY else len(curvature.rows.slices) >= 4
    assert_same(everything(curvature, features, 2 * X_new), expected)


@pytest.mark.parametrize("memory", [PLENTY, TINY])
@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("name", LARGE)
def test_solve_and_refine(name, outputs, memory):
    model, X = large(name, 8, outputs)
    l2 = penalties(model)["parameter"]
    _, H = dense(model, X, X[:1], l2)
    features = rows_of(model, X, memory)
    curvature, explicit = fit_full(features, l2, form="kernels"), fit_full(rows_of(model, X), l2, form="dual")
    vectors = torch.randn(features.size, 3, dtype=torch.float64)
    torch.testing.assert_close(H @ curvature.solve(vectors), vectors, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(curvature.solve(vectors)[:, 1], curvature.solve(vectors[:, 1]))
    e = torch.randn(8, outputs, dtype=torch.float64)
    weights = torch.cat([p.detach().flatten() for p in features.jacobian.parameters.values()])
    step, refined = curvature.refine(e, weights)
    expected_step, expected_refined = explicit.refine(e, weights)
    torch.testing.assert_close(refined, expected_refined, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(step, expected_step, rtol=1e-8, atol=1e-8)
    change = features.jacobian(X[:3])[1] @ step
    torch.testing.assert_close(curvature.change(X[:3], step), change, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("way", ["pairs", "formed"])
@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 9),
    m=st.integers(1, 9),
    outputs=st.integers(1, 3),
    positions=st.integers(1, 5),
    shape=st.tuples(st.integers(1, 5), st.integers(1, 6)),
    work=st.sampled_from([1, 500, 10_000, 10**7]),
)
def test_both_ways_to_a_kernel(way, n, m, outputs, positions, shape, work):
    """In pairs of positions and from gradients formed in slices: the product of the gradients."""
    p, q = shape
    generator = torch.Generator().manual_seed(n + 10 * m)

    def some(rows):
        a = torch.randn(rows, positions, q, generator=generator, dtype=torch.float64)
        g = torch.randn(rows, outputs, p, positions, generator=generator, dtype=torch.float64)
        return Factors((nn.Linear(q, p),), (a,), g), torch.einsum("ntq,nopt->nopq", a, g).flatten(2).flatten(0, 1)

    (left, P), (right, Q) = some(n), some(m)
    costs = {"pairs": (0.0, 1.0), "formed": (1.0, 0.0)}[way]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(factors, "operations", lambda *_: costs)
        patch.setattr(factors, "_LEAST_STRIPE", 2)
        out = torch.ones(n * outputs, m * outputs, dtype=torch.float64)
        add_kernel(out, left, right, 0.5, work)
        torch.testing.assert_close(out, 1 + 0.5 * P @ Q.T)
        own = torch.zeros(n * outputs, n * outputs, dtype=torch.float64)
        add_kernel(own, left, left, 2.0, work)
        torch.testing.assert_close(own.tril(), (2 * P @ P.T).tril())
        scale = torch.rand(p * q, generator=generator, dtype=torch.float64)
        out.zero_()
        add_kernel(out, left, right, scale, work)
        torch.testing.assert_close(out, (P * scale) @ (Q * scale).T)
    whole = Whole(P.view(n, outputs, -1))
    v, u = torch.randn(p * q, 2, dtype=torch.float64), torch.randn(n * outputs, 2, dtype=torch.float64)
    for part in (left, whole):
        torch.testing.assert_close(part.push(v, work), P @ v)
        torch.testing.assert_close(part.pull(u, work), P.T @ u)


def test_the_cheaper_way_is_taken():
    def part(positions, q, p):
        g = torch.zeros(1, 1, p, positions, dtype=torch.float64)
        return Factors((nn.Linear(q, p, device="meta"),), (torch.zeros(1, positions, q),), g)

    pairs, formed = factors.operations(part(1, 1000, 1000), 500, 500)
    assert pairs < formed / 400
    pairs, formed = factors.operations(part(1024, 576, 64), 500, 500)
    assert formed < pairs / 1000


def test_what_layers_explain_and_what_they_do_not():
    model, X = large("odd", 8)
    dissection = KernelRows(rows_of(model, X)).dissection
    assert set(dissection._rest) == {
        "scale", "grouped.weight", "grouped.bias", "by_hand.weight", "by_hand.bias", "conv1d.weight", "conv1d.bias"
    }  # fmt: skip
    block = dissection(X)
    phi = torch.split(dense_jacobian(model, X)[1], [p.numel() for p in model.parameters() if p.requires_grad], 2)
    for name, expected in zip(dissection.jacobian.parameters, phi):
        if name.startswith("unused"):
            assert name not in block
        else:
            torch.testing.assert_close(block[name].whole().rows, expected, rtol=1e-10, atol=1e-12)
    assert block["tied.weight"].positions == 2  # the layer, and the other one with its weight
    resnet, X = large("resnet", 4)
    assert KernelRows(rows_of(resnet, X)).dissection._rest == []


def test_kernels_are_taken_where_gradients_do_not_fit():
    model, X = large("mlp", 30)
    size = 8 * 30 * sum(p.numel() for p in model.parameters())
    assert fit_full(rows_of(model, X, 2 * size), 1.0).name == "full, dual"
    assert fit_full(rows_of(model, X, 2 * size - 2), 1.0).name == "full, kernels"
    assert fit_full(rows_of(model, X, 2 * size - 2), 1.0, form="dual").name == "full, dual"
    # Nothing is won where nearly all of the gradient must be kept.
    odd, X = large("odd", 30)
    assert kernel_rows(rows_of(odd, X, TINY)) is None
    assert fit_full(rows_of(odd, X, TINY), 1.0).name == "full, dual"


class Single(nn.Module):
    """Computes in float32 whatever it is asked for."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 1))

    def forward(self, x):
        for layer in self.net:
            x = layer(x) if not isinstance(layer, nn.Linear) else nn.functional.linear(
                x.float(), layer.weight.float(), layer.bias.float())  # fmt: skip
        return x


def test_a_network_that_float64_does_not_reach_keeps_its_gradients():
    torch.manual_seed(0)
    model, X = Single(), torch.randn(20, 5)
    features = rows_of(model, X, TINY)
    assert kernel_rows(features) is None
    assert fit_full(features, 1.0).name == "full, dual"


class Branching(nn.Module):
    """Another layer for rows with a large first entry."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(5, 40), nn.Linear(5, 40), nn.Linear(40, 1)

    def forward(self, x):
        layer = self.b if float(x.detach()[:, 0].amax()) > 100 else self.a
        return self.out(torch.tanh(layer(x)))


def test_rows_that_take_other_layers_are_refused():
    torch.manual_seed(0)
    model, X = Branching().double(), torch.randn(40, 5, dtype=torch.float64)
    features = rows_of(model, X, TINY)
    curvature = fit_full(features, 1.0)
    assert curvature.name == "full, kernels"
    with pytest.raises(ValueError, match="model runs other layers for rows of X than for those it was probed with"):
        curvature.query(torch.full((1, 5), 200.0, dtype=torch.float64))


@pytest.mark.parametrize("name", ["mlp", "resnet"])
def test_a_float32_network_is_that_of_float64(name):
    """All is computed in float64, so that the leverages are those of the same weights in float64, to 1e-8.

    Kernels are some 1e5 times the leverages here; the explicit form has its gradients in float32.
    """
    model, X = large(name, 30, dtype=torch.float32)
    X[15:] = X[:15] + 1e-3 * torch.randn_like(X[15:])
    _, X_new = large(name, 6, dtype=torch.float32, seed=2)
    X_new = X[:6] + 1e-3 * X_new
    double = copy.deepcopy(model).double()
    l2 = 1e-5 * float(dense_jacobian(double, X.double())[1].square().sum(2).mean())
    truth = fit_full(rows_of(double, X.double()), l2, form="dual")
    expected = truth.query(truth.features.jacobian(X_new.double())[1])
    errors = {}
    for memory in (PLENTY, TINY):
        curvature = fit_full(rows_of(model, X, memory), l2, form="kernels")
        found = curvature.query(X_new)
        errors[memory] = float(((found.leverage - expected.leverage) / expected.leverage).abs().max())
        torch.testing.assert_close(curvature.slack(), truth.slack(), rtol=1e-8, atol=1e-10)
    explicit = fit_full(rows_of(model, X), l2, form="dual")
    found = explicit.query(explicit.features.jacobian(X_new)[1])
    rough = float(((found.leverage - expected.leverage) / expected.leverage).abs().max())
    assert max(errors.values()) < 1e-8
    assert max(errors.values()) < rough / 10


def test_a_leverage_lost_to_rounding_is_refused():
    """A test point beside a training row, with kernels 1e15 times its leverage: what is left of them is rounding."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 200), nn.Tanh(), nn.Linear(200, 1)).double()
    X = 30 * torch.eye(3, dtype=torch.float64)
    with pytest.raises(NotPositiveDefiniteError, match="row 2 of X: the smallest l2, 1e-14, is too small"):
        fit_full(rows_of(model, X[[0, 1, 1]]), 1e-14, form="kernels")
    curvature = fit_full(rows_of(model, X), 1e-14, form="kernels")
    assert (curvature.query(-X).leverage > 0).all()
    with pytest.raises(NotPositiveDefiniteError, match=r"of a test point is lost .* l2, 1e-14, is too small"):
        curvature.query(X + 1e-9)


@pytest.mark.parametrize("memory", [PLENTY, TINY])
@pytest.mark.parametrize(("name", "outputs"), [("resnet", 2), ("mlp", 1), ("odd", 2)])
def test_kernels_of_groups_for_tuning(name, outputs, memory):
    model, X = large(name, 8, outputs)
    rows = KernelRows(rows_of(model, X, memory))
    phi = dense_jacobian(model, X)[1].flatten(0, 1)
    parameters = rows.features.jacobian.parameters
    parts = torch.split(phi, [p.numel() for p in parameters.values()], 1)
    K = rows.kernels([[key] for key in parameters])
    torch.testing.assert_close(K, torch.stack([P @ P.T for P in parts]), rtol=1e-9, atol=1e-12)
    l2 = torch.rand(len(parameters), dtype=torch.float64) + 0.5
    scales = rows.scales(expand_l2(l2, parameters, X.device))
    made, anew = rows.kernel(scales), rows.kernel(scales)  # from what was kept, and not
    torch.testing.assert_close(made.tril(), anew.tril(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("structure", ["layer", "scalar"])
def test_tuning_needs_no_gradients(structure, monkeypatch):
    model, X = large("mlp", 20)
    e = torch.randn(20, 1, dtype=torch.float64)
    expected = tune(rows_of(model, X), e, structure=structure)
    features = rows_of(model, X, 80_000)
    assert kernel_rows(features) is not None
    monkeypatch.setattr(FeatureRows, "chunks", None)
    monkeypatch.setattr(FeatureRows, "block", None)
    found = tune(features, e, structure=structure)
    assert found.log_marginal_likelihood == pytest.approx(expected.log_marginal_likelihood, rel=1e-9)
    assert found.l2 == pytest.approx(expected.l2, rel=1e-3)
    curvature = fit_curvature(features, "full", found.l2)
    assert curvature.name == "full, kernels"
    evidence = evidence_of(features, e, "layer")
    assert evidence.groups == len(features.jacobian.parameters)


METHODS = {
    "full": lambda model, memory: fullcp.FullConformalRegressor(model, l2=0.5, memory=memory),
    "refined": lambda model, memory: fullcp.FullConformalRegressor(model, l2=0.5, refine=True, memory=memory),
    "split": lambda model, memory: fullcp.RefinedSplitConformalRegressor(model, l2=0.5, memory=memory),
    "tuned": lambda model, memory: fullcp.FullConformalRegressor(model, memory=memory),
    "laplace": lambda model, memory: fullcp.LaplaceRegressor(model, l2=0.5, memory=memory),
    "scp-gn": lambda model, memory: fullcp.NormalizedSplitConformalRegressor(model, l2=0.5, memory=memory),
    "grid": lambda model, memory: fullcp.GridFullConformalRegressor(model, l2=0.5, candidates=20, memory=memory),
    "indirect": lambda model, memory: fullcp.GridFullConformalRegressor(
        model, l2=0.5, candidates=20, approach="indirect", memory=memory
    ),
}


def fitted(method, model, X, y, memory):
    cp = METHODS[method](model, memory)
    if hasattr(cp, "fit"):
        cp = cp.fit(X, y)
    return cp.conformalize(X, y) if hasattr(cp, "conformalize") else cp


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_predictors_need_no_gradients(method, outputs, tmp_path):
    """The same intervals as with plenty of memory, before and after saving, pickled and copied."""
    if outputs > 1 and method in ("grid", "indirect"):
        pytest.skip("for one output")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 60), nn.Tanh(), nn.Linear(60, 60), nn.Tanh(), nn.Linear(60, outputs)).double()
    X, X_new = torch.randn(50, 4, dtype=torch.float64), torch.randn(7, 4, dtype=torch.float64)
    y = X[:, :outputs].sin() + 0.1 * torch.randn(50, outputs, dtype=torch.float64)
    y = y[:, 0] if outputs == 1 else y
    cp, plenty = fitted(method, model, X, y, "1MB"), fitted(method, model, X, y, "1GB")
    assert cp.curvature_.name == "full, kernels"
    assert plenty.curvature_.name == "full, dual"
    found, expected = cp.predict_interval(X_new, [0.8, 0.9]), plenty.predict_interval(X_new, [0.8, 0.9])
    tolerance = 1e-2 if method == "tuned" else 1e-7
    torch.testing.assert_close(found.intervals, expected.intervals, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found.prediction, expected.prediction)
    torch.testing.assert_close(cp.predict(X_new), plenty.predict(X_new))
    cp.save(tmp_path / "cp")
    again = type(cp).load(tmp_path / "cp", model)
    assert again.curvature_.name == "full, kernels"
    for other in (again, pickle.loads(pickle.dumps(cp)), copy.deepcopy(cp)):
        assert torch.equal(other.predict_interval(X_new, [0.8, 0.9]).intervals, found.intervals)


def test_restored_over_the_same_rows():
    model, X = large("resnet", 8, 2)
    features = rows_of(model, X, TINY)
    curvature = fit_full(features, 0.5, form="kernels")
    again = restore(rows_of(model, X, PLENTY), curvature.state())
    assert_same(everything(again, again.features, X[:3] + 0.1), everything(curvature, features, X[:3] + 0.1), 1e-10)


def test_the_network_is_left_as_it_was():
    model, X = large("resnet", 6)
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    features = rows_of(model, X, TINY)
    with torch.inference_mode():
        fit_full(features, 0.5, form="kernels").query(X[:2])
    assert model.training
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


def test_what_test_points_are_asked_for():
    model, X = large("mlp", 20)
    features = rows_of(model, X, TINY)
    kernels, explicit = fit_full(features, 1.0), fit_full(rows_of(model, X), 1.0)
    f, points = look_at(kernels, features.jacobian, X[:3])
    assert points.shape == (3, 5)
    f_explicit, phi = look_at(explicit, explicit.features.jacobian, X[:3])
    assert phi.shape == (3, 1, features.size)
    torch.testing.assert_close(f, f_explicit)


@pytest.mark.parametrize("kind", ["mlp", pytest.param("cnn", marks=pytest.mark.slow)])
def test_memory(kind):
    """Gradients of 8 GB and more, within 600 MB beyond what there was before."""
    script = Path(__file__).with_name("large_memory_run.py")
    run = subprocess.run([sys.executable, str(script), kind], check=True, capture_output=True, text=True)
    report = json.loads(run.stdout)
    assert report["gradients"] > 8e9
    assert report["curvature"] == "full, kernels"
    assert report["finite"]
    assert report["peak"] < 600e6, report
    assert run.stderr == ""
