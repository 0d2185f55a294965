"""Ways to the intervals and p-values that the engine has, for benchmarks/prediction.py, and what memory each takes.

    python benchmarks/ways.py FOLDER ours|dense|formulas   # bytes that the first prediction takes, in a fresh process

- ours: `predict_interval`.
- dense: gradients, whiten, multiply with all whitened rows (held in float64), changepoints, k-th values by partial
  sorting, in chunks of test points.
- formulas: H^-1 at hand, and for each test point cross leverages, changepoints and a full sort.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import warnings
from fractions import Fraction
from pathlib import Path

import torch
from measure import Anonymous

import fullcp
from fullcp.influence import absolute_changepoints, signed_changepoints
from fullcp.regions import absolute_p_values, absolute_rank, order_statistics, signed_p_values, signed_ranks
from fullcp.training import mlp

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Ours:
    """The library's way."""

    def __init__(self, cp):
        self.cp = cp

    def intervals(self, X, levels):
        """Ends (m, 2, L)."""
        return self.cp.predict_interval(X, levels).intervals


class Dense:
    """The best straightforward way: everything of training that can be had before is."""

    def __init__(self, cp):
        self.cp, self.engine, curvature = cp, cp._engine, cp.curvature_
        self.L, features = curvature.factor, curvature.features
        self.Z = torch.cat([curvature._whiten(phi).T for _, phi in features.chunks()])  # (N, D), whitened

    def changepoints(self, X, chunk):
        """Test points in chunks: which they are, their predictions (m,) and both kinds of changepoint (m, N)."""
        engine = self.engine
        e, s = engine.e[:, 0], engine.slack[:, 0, 0]
        ends = signed_changepoints if engine.residuals == "signed" else absolute_changepoints
        for start in range(0, len(X), chunk):
            f, phi = self.cp.network_(X[start : start + chunk])
            z = torch.linalg.solve_triangular(self.L, phi[:, 0].double().T, upper=False)  # (D, m)
            yield start, f.double()[:, 0], *ends(engine.score, e, s, z.T @ self.Z.T, z.square().sum(0))

    def intervals(self, X, levels, chunk=256):
        """Ends (m, 2, L)."""
        N, parts = len(self.engine.e), []
        levels = [Fraction(str(level)) for level in levels]
        high = [absolute_rank(level, N) for level in levels]
        signed = self.engine.residuals == "signed"
        ranks = [signed_ranks(level, N) for level in levels] if signed else [(N + 1 - k, k) for k in high]
        for _, f, lower, upper in self.changepoints(X, chunk):
            low = order_statistics(lower.clone() if lower is upper else lower, [a for a, _ in ranks])
            parts.append(f[:, None, None] + torch.stack([low, order_statistics(upper, [b for _, b in ranks])], 1))
        return torch.cat(parts)

    def p_values(self, X, y, chunk=256):
        """P-values (m,) of labels y (m,)."""
        value = signed_p_values if self.engine.residuals == "signed" else absolute_p_values
        found = self.changepoints(X, chunk)
        return torch.cat([value(low, up, f, y[start : start + len(f)]) for start, f, low, up in found])


class Formulas:
    """One test point after the other, as the formulas stand in the paper (studentized scores)."""

    def __init__(self, cp):
        self.cp, self.engine = cp, cp._engine
        self.phi = torch.cat([phi[:, 0].double() for _, phi in cp.curvature_.features.chunks()])
        self.inverse = torch.cholesky_inverse(cp.curvature_.factor)

    def intervals(self, X, levels):
        """Ends (m, 2, L)."""
        e, h_i, N = self.engine.e[:, 0], 1 - self.engine.slack[:, 0, 0], len(self.phi)
        found = []
        for x in X:
            f, phi = self.cp.network_(x.unsqueeze(0))
            g = self.inverse @ phi[0, 0].double()
            h, c = phi[0, 0].double() @ g, self.phi @ g
            A, B = e / (1 - h_i + c**2 / (1 + h)).sqrt(), c / ((1 - h_i + c**2 / (1 + h)).sqrt() * (1 + h))
            b = 1 / (1 + h).sqrt()
            if self.engine.residuals == "signed":
                r = (A / (b + B)).sort().values
                pairs = [signed_ranks(Fraction(str(level)), N) for level in levels]
                ends = [[r[low - 1] for low, _ in pairs], [r[high - 1] for _, high in pairs]]
            else:
                left, right = (A.abs() / (b - A.sign() * B)).sort().values, (A.abs() / (b + A.sign() * B)).sort().values
                ranks = [absolute_rank(Fraction(str(level)), N) for level in levels]
                ends = [[-left[k - 1] for k in ranks], [right[k - 1] for k in ranks]]
            found.append(f.double()[0, 0] + torch.tensor(ends, dtype=torch.float64))
        return torch.stack(found)


WAYS = {"ours": Ours, "dense": Dense, "formulas": Formulas}


def peaks(cp, X, levels, hidden, ways):
    """Megabytes that each way takes for its first prediction, each in a process of its own that did nothing before.

    What a way keeps of the training rows is among them: gradients (ours), whitened rows, gradients and H^-1.
    """
    with tempfile.TemporaryDirectory() as folder:
        cp.save(Path(folder, "cp"))
        torch.save((cp.model.state_dict(), X.cpu(), levels, hidden), Path(folder, "rest"))
        found = {}
        for way in ways:
            command = [sys.executable, __file__, folder, way]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            found[way] = round(int(done.stdout) / 1e6)
    return found


def main(folder, way):
    """Print the bytes that the first prediction takes."""
    warnings.simplefilter("ignore")
    weights, X, levels, hidden = torch.load(Path(folder, "rest"))
    model = mlp(X.shape[1], hidden).to(DEVICE)
    model.load_state_dict(weights)
    cp, X = fullcp.FullConformalRegressor.load(Path(folder, "cp"), model), X.to(DEVICE)
    if DEVICE.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        WAYS[way](cp).intervals(X, levels)
        print(torch.cuda.max_memory_allocated() - before)
        return
    with Anonymous() as memory:
        WAYS[way](cp).intervals(X, levels)
    print(memory.above)


if __name__ == "__main__":
    main(*sys.argv[1:])
