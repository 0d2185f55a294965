"""The contract every curvature structure passes, and what is particular to the exact one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fullcp.curvature import NotPositiveDefiniteError, expand_l2, fit_curvature, jacobian_for, restore
from fullcp.curvature.full import fit_full
from fullcp.curvature.last_layer import fit_last_layer
from fullcp.features import FeatureRows, Jacobian
from fullcp.features.symmetric import add_gram, mirror
from reference import dense_jacobian, dense_kfac, dense_low_rank

# A structure is tested by adding a line: name -> fit(features, l2). The name begins with the users' word for it.
STRUCTURES = {
    "full, primal": lambda features, l2: fit_full(features, l2, form="primal"),
    "full, dual": lambda features, l2: fit_full(features, l2, form="dual"),
    "last_layer, primal": lambda features, l2: fit_last_layer(features, l2, form="primal"),
    "last_layer, dual": lambda features, l2: fit_last_layer(features, l2, form="dual"),
    "kfac": lambda features, l2: fit_curvature(features, "kfac", l2),
    "diagonal": lambda features, l2: fit_curvature(features, "diagonal", l2),
    "low_rank": lambda features, l2: fit_curvature(features, "low_rank", l2),  # of full rank here
    "low_rank:7": lambda features, l2: fit_curvature(features, "low_rank:7", l2),
}
EXACT = {name for name in STRUCTURES if name.startswith(("full", "last_layer")) or name == "low_rank"}


def network(inputs, hidden, outputs, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs)).double()


def problem(rows=30, hidden=4, outputs=1, seed=0, memory=10**8, structure="full"):
    model = network(3, hidden, outputs, seed)
    X = torch.randn(rows, 3, dtype=torch.float64)
    return model, X, FeatureRows(jacobian_for(structure.split(",")[0], model, X), X, memory=memory)


def dense_sum(structure, model, X):
    """S as the structure sees it with l2 = 0.5, from gradients of single rows."""
    if structure == "kfac":
        return torch.block_diag(*dense_kfac(model, X).values())
    phi = dense_jacobian(model, X)[1].flatten(0, 1)
    if structure.startswith("last_layer"):
        phi = phi[:, -sum(p.numel() for p in model[-1].parameters()) :]
    if structure == "low_rank:7":
        return dense_low_rank(phi.T @ phi / 0.5, 7) * 0.5
    return torch.diag(phi.square().sum(0)) if structure == "diagonal" else phi.T @ phi


def penalties(model):
    sizes = [p.numel() for p in model.parameters()]
    generator = torch.Generator().manual_seed(5)
    per_layer = [0.3 * 2**i for i in range(len(sizes))]
    return {"scalar": 0.7, "layer": per_layer, "parameter": torch.rand(sum(sizes), generator=generator) + 0.1}


def everything(curvature, features, phi):
    query = curvature.query(phi)
    cross = torch.cat([query.cross(rows) for rows in features.slices()], dim=1)
    return {"slack": curvature.slack(), "leverage": query.leverage, "cross": cross}


def assert_same(left, right, tolerance):
    assert left.keys() == right.keys()
    for key in left:
        torch.testing.assert_close(
            left[key], right[key], rtol=tolerance, atol=tolerance, msg=lambda m, k=key: f"{k}: {m}"
        )


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("outputs", [1, 3])
class TestContract:
    def test_leverages_are_positive_and_bound_the_cross_leverages(self, structure, outputs):
        model, X, features = problem(outputs=outputs, structure=structure)
        curvature = STRUCTURES[structure](features, 0.5)
        _, phi = features.jacobian(3 * torch.randn(9, 3, dtype=torch.float64))
        found = everything(curvature, features, phi)
        eye = torch.eye(outputs, dtype=torch.float64)
        V, V_new, C = eye - found["slack"], found["leverage"], found["cross"]
        assert V.shape == (30, outputs, outputs)
        assert V_new.shape == (9, outputs, outputs)
        assert C.shape == (9, 30, outputs, outputs)
        assert (torch.linalg.eigvalsh(V) > 0).all()
        assert (torch.linalg.eigvalsh(V_new) > 0).all()
        bound = (V.diagonal(dim1=1, dim2=2)[None, :, :, None] * V_new.diagonal(dim1=1, dim2=2)[:, None, None]).sqrt()
        assert (C.abs() <= bound * (1 + 1e-9)).all()
        if structure in EXACT:
            assert (torch.linalg.eigvalsh(V) < 1).all()

    def test_training_rows_asked_as_test_points_give_their_own_leverages(self, structure, outputs):
        model, X, features = problem(outputs=outputs, structure=structure)
        curvature = STRUCTURES[structure](features, 0.5)
        found = everything(curvature, features, features.jacobian(X)[1])
        eye = torch.eye(outputs, dtype=torch.float64)
        torch.testing.assert_close(found["leverage"], eye - found["slack"], rtol=1e-9, atol=1e-11)
        own = found["cross"][torch.arange(30), torch.arange(30)]
        torch.testing.assert_close(own, found["leverage"], rtol=1e-9, atol=1e-11)

    def test_order_of_rows_is_immaterial(self, structure, outputs):
        model, X, features = problem(outputs=outputs, structure=structure)
        order = torch.randperm(30)
        shuffled = FeatureRows(features.jacobian, X[order], memory=10**8)
        _, phi = features.jacobian(torch.randn(5, 3, dtype=torch.float64))
        first = everything(STRUCTURES[structure](features, 0.5), features, phi)
        second = everything(STRUCTURES[structure](shuffled, 0.5), shuffled, phi)
        expected = {
            "slack": first["slack"][order],
            "leverage": first["leverage"],
            "cross": first["cross"][:, order],
        }
        assert_same(second, expected, 1e-9)

    def test_chunks_are_immaterial(self, structure, outputs):
        model, X, whole = problem(rows=900, outputs=outputs, structure=structure)
        _, phi = whole.jacobian(X[:5] + 0.1)
        expected = everything(STRUCTURES[structure](whole, 0.5), whole, phi)
        for memory in (10**5, 10**6):  # next to nothing held, all held
            chunked = FeatureRows(whole.jacobian, X, memory=memory)
            assert len(chunked.slices()) > 2
            found = everything(STRUCTURES[structure](chunked, 0.5), chunked, phi)
            assert_same(found, expected, 1e-8)

    def test_l2_limits(self, structure, outputs):
        model, X, features = problem(
            rows=6, hidden=8, outputs=outputs, structure=structure
        )  # more parameters than rows
        _, phi = features.jacobian(X)
        stiff = STRUCTURES[structure](features, 1e12).leverage(phi)
        assert stiff.abs().max() < 1e-10
        if structure not in EXACT:
            return
        loose = STRUCTURES[structure](features, 1e-6).leverage(phi)
        torch.testing.assert_close(loose, torch.eye(outputs, dtype=torch.float64).expand_as(loose), rtol=0, atol=1e-3)

    def test_saved_state_brings_it_back(self, structure, outputs):
        model, X, features = problem(outputs=outputs, structure=structure)
        curvature = STRUCTURES[structure](features, 0.5)
        again = restore(FeatureRows(features.jacobian, X, memory=10**8), curvature.state())
        _, phi = features.jacobian(torch.randn(5, 3, dtype=torch.float64))
        assert_same(everything(again, features, phi), everything(curvature, features, phi), 0.0)
        assert again.name == curvature.name

    def test_solve_inverts_H(self, structure, outputs):
        model, X, features = problem(outputs=outputs, structure=structure)
        curvature = STRUCTURES[structure](features, 0.5)
        H = dense_sum(structure, model, X) + 0.5 * torch.eye(features.size, dtype=torch.float64)
        vectors = torch.randn(features.size, 4, dtype=torch.float64)
        torch.testing.assert_close(H @ curvature.solve(vectors), vectors, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(curvature.solve(vectors)[:, 0], curvature.solve(vectors[:, 0]))

    def test_refinement_ends_at_the_ridge_solution(self, structure, outputs):
        model, X, features = problem(outputs=outputs, structure=structure)
        l2 = torch.tensor([0.3 * 2**i for i in range(len(features.jacobian.parameters))])
        phi = torch.cat([phi for _, phi in features.chunks()]).double()  # (N, O, D)
        theta = torch.cat([p.detach().flatten() for p in features.jacobian.parameters.values()])
        e = torch.randn(30, outputs, dtype=torch.float64)
        diagonal = expand_l2(l2, features.jacobian.parameters, X.device)
        flat = phi.flatten(0, 1)
        expected = torch.linalg.solve(flat.T @ flat + diagonal.diag(), flat.T @ e.flatten() - diagonal * theta)
        curvature = STRUCTURES[structure](features, l2)
        step, refined = curvature.refine(e, theta)
        torch.testing.assert_close(step, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(refined, e - phi @ step, rtol=1e-10, atol=1e-10)
        rough = curvature.refine(e, theta, exactly=False)[1]
        assert (rough - refined).norm() < 0.15 * (e - refined).norm()


@pytest.mark.parametrize("size", [1, 255, 256, 257, 513, 4100])
def test_gram_products_of_blocks(size):
    generator = torch.Generator().manual_seed(size)
    P, Q = (torch.randn(n, size, generator=generator, dtype=torch.float64) for n in (3, 5))
    S = torch.zeros(size, size, dtype=torch.float64)
    add_gram(S, P)
    add_gram(S, Q)
    assert mirror(S) is S
    torch.testing.assert_close(S, P.T @ P + Q.T @ Q, rtol=1e-12, atol=1e-12)
    assert torch.equal(S, S.T)


def test_the_factor_takes_the_place_of_the_matrix():
    _, _, features = problem()
    phi = features.block(slice(0, 30)).clone()
    curvature = fit_full(features, 0.5, form="primal")
    S = features.gram(keep=True)
    H = S + 0.5 * torch.eye(features.size, dtype=torch.float64)
    factor = fit_full(features, 0.5, form="primal").factor
    assert factor.data_ptr() == S.data_ptr()
    assert torch.equal(factor, curvature.factor)
    torch.testing.assert_close(factor @ factor.T, H, rtol=1e-12, atol=1e-12)
    assert (factor.triu(1) == 0).all()
    # Solves work in place on a copy: gradients that are float64 already are left alone.
    curvature.slack(), curvature.query(features.block(slice(0, 30)))
    assert torch.equal(features.block(slice(0, 30)), phi)


@pytest.mark.parametrize("form", ["primal", "dual"])
@pytest.mark.parametrize("kind", ["scalar", "layer", "parameter"])
@pytest.mark.parametrize(("rows", "hidden", "outputs"), [(40, 4, 1), (7, 9, 1), (20, 3, 3), (5, 6, 2)])
def test_exact_curvature_equals_dense_inverse(form, kind, rows, hidden, outputs):
    model, X, features = problem(rows, hidden, outputs)
    l2 = penalties(model)[kind]
    X_new = 2 * torch.randn(6, 3, dtype=torch.float64)
    phi, phi_new = dense_jacobian(model, X)[1], dense_jacobian(model, X_new)[1]
    flat = phi.flatten(0, 1)
    H_inv = torch.linalg.inv(flat.T @ flat + torch.diag(expand_l2(l2, features.jacobian.parameters, X.device)))
    eye = torch.eye(outputs, dtype=torch.float64)
    expected = {
        "slack": eye - torch.einsum("nod,de,npe->nop", phi, H_inv, phi),
        "leverage": torch.einsum("nod,de,npe->nop", phi_new, H_inv, phi_new),
        "cross": torch.einsum("nod,de,mpe->mnop", phi, H_inv, phi_new),
    }
    curvature = fit_full(features, l2, form=form)
    assert_same(everything(curvature, features, features.jacobian(X_new)[1]), expected, 1e-8)


@settings(max_examples=60)
@given(
    rows=st.integers(2, 40),
    hidden=st.integers(1, 12),
    outputs=st.integers(1, 3),
    l2=st.floats(1e-3, 1e3),
    seed=st.integers(0, 10**6),
)
def test_primal_and_dual_agree(rows, hidden, outputs, l2, seed):
    model, X, features = problem(rows, hidden, outputs, seed)
    _, phi = features.jacobian(3 * torch.randn(6, 3, dtype=torch.float64))
    results = [everything(fit_full(features, l2, form=form), features, phi) for form in ("primal", "dual")]
    assert_same(results[0], results[1], 1e-8)


@pytest.mark.parametrize("l2", [1e-2, 1e-6, 1e-10])
@pytest.mark.parametrize("size", [11, 12, 30])
def test_refinement_keeps_its_digits(size, l2):
    """Against 60-digit arithmetic: far from the minimum, with residuals that shrink with l2."""
    mp = pytest.importorskip("mpmath")
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(12, size, generator=generator, dtype=torch.float64)
    e, theta = torch.randn(12, 1, generator=generator).double(), torch.randn(size, generator=generator).double()
    model = nn.Linear(size, 1, bias=False).double()
    curvature = fit_full(FeatureRows(Jacobian(model, X), X, memory=10**8), l2)
    step, refined = curvature.refine(e, theta)
    with mp.workdps(60):
        A, t = mp.matrix(X.tolist()), mp.matrix(theta.tolist())
        targets = mp.matrix(e[:, 0].tolist()) + A * t
        solution = mp.lu_solve(A.T * A + mp.mpf(l2) * mp.eye(size), A.T * targets)
        left, change = targets - A * solution, solution - t
        left, change = ([float(value) for value in vector] for vector in (left, change))
    scale = max(map(abs, left))
    torch.testing.assert_close(
        refined[:, 0], torch.tensor(left, dtype=torch.float64), rtol=0, atol=1e-9 * scale + 1e-13
    )
    if size > 12:
        torch.testing.assert_close(refined[:, 0], torch.tensor(left, dtype=torch.float64), rtol=1e-9, atol=0)
    torch.testing.assert_close(step, torch.tensor(change, dtype=torch.float64), rtol=1e-6, atol=1e-9)
    rough = curvature.refine(e, theta, exactly=False)[1]
    torch.testing.assert_close(rough, refined, rtol=1e-3, atol=1e-3)


def test_the_smaller_form_is_taken():
    _, _, tall = problem(rows=60, hidden=3)
    _, _, wide = problem(rows=6, hidden=9)
    assert fit_full(tall, 1.0).name == "full, primal"
    assert fit_full(wide, 1.0).name == "full, dual"
    assert fit_full(tall, [0.0, 1.0, 1.0, 1.0]).name == "full, primal"


class TestPenalty:
    parameters = dict(nn.Linear(3, 2).named_parameters())

    @pytest.mark.parametrize(
        ("l2", "expected"),
        [
            (2, [2.0] * 8),
            (torch.tensor(0.5), [0.5] * 8),
            ([1.0, 3.0], [1.0] * 6 + [3.0] * 2),
            (torch.arange(8), list(range(8))),
        ],
    )
    def test_expands(self, l2, expected):
        assert expand_l2(l2, self.parameters, torch.device("cpu")).tolist() == expected

    @pytest.mark.parametrize(
        ("l2", "error", "words"),
        [
            (-1.0, ValueError, "not negative, got -1"),
            (float("nan"), ValueError, "finite"),
            ([1.0, float("inf")], ValueError, "finite"),
            ([1.0, 2.0, 3.0], ValueError, "one number, 2 values .* or 8"),
            (torch.ones(2, 2), ValueError, "one-dimensional"),
            ([], ValueError, "one-dimensional"),
            ("strong", TypeError, "l2 must be a number"),
            (None, TypeError, "l2 must be a number"),
            (True, TypeError, "l2 must be a number"),
        ],
    )
    def test_refuses(self, l2, error, words):
        with pytest.raises(error, match=words):
            expand_l2(l2, self.parameters, torch.device("cpu"))


class TestSingular:
    def test_primal_names_the_parameter_and_its_l2(self):
        model = nn.Linear(3, 1, bias=False).double()
        X = torch.randn(20, 3, dtype=torch.float64)
        X[:, 2] = X[:, 0] + X[:, 1]
        features = FeatureRows(Jacobian(model, X), X, memory=10**8)
        with pytest.raises(NotPositiveDefiniteError, match=r"weight\[0, 2\]: l2 = 0"):
            fit_full(features, 0.0, form="primal")
        fit_full(features, 1e-3, form="primal")

    def test_dual_names_the_row(self):
        model = nn.Linear(9, 1, bias=False).double()
        X = torch.randn(5, 9, dtype=torch.float64)
        X[4] = X[1]
        features = FeatureRows(Jacobian(model, X), X, memory=10**8)
        with pytest.raises(NotPositiveDefiniteError, match="row 4 of X: the smallest l2, 1e-20"):
            fit_full(features, 1e-20, form="dual")
        fit_full(features, 1e-3, form="dual")

    def test_dual_needs_a_positive_l2(self):
        _, _, features = problem(rows=5, hidden=5)
        with pytest.raises(ValueError, match="l2 must be positive everywhere in the dual form"):
            fit_full(features, 0.0, form="dual")

    def test_a_matrix_that_does_not_fit_is_refused(self):
        model = nn.Linear(400_000, 1)
        X = torch.randn(3, 400_000)
        features = FeatureRows(Jacobian(model, X), X, memory=10**9)
        with pytest.raises(MemoryError, match=r"GB for a 400001 x 400001 matrix.*'last_layer' and 'low_rank'"):
            fit_full(features, 1.0, form="primal")
