"""Leave-one-out from one fit, and jackknife+ with it.

Taking training row i away from a ridge regression moves its residual, its prediction at a test point and the leverages
of both to

    q_i = e_i / (1 - h_i),   f - c_i q_i,   h_i / (1 - h_i),   h + c_i^2 / (1 - h_i)

so that the N models without one row each are known from the model with all. With several outputs S_i = I - V_i takes
the place of 1 - h_i: q_i = S_i^-1 e_i, f - C_i^T q_i, V_i S_i^-1, V + C_i^T S_i^-1 C_i. Jackknife+ (Barber, Candes,
Ramdas and Tibshirani, 2021) takes order statistics of the ends

    f - c_i q_i -+ w_i,   plain        w_i = |q_i|
                          normalised   w_i = |q_i| sqrt(1 + h + c_i^2 / (1 - h_i)) / sqrt(1 + h_i / (1 - h_i))

the floor(alpha (N + 1))-th smallest of the lower, the ceil((1 - alpha)(N + 1))-th smallest of the upper ones. Every
output is a problem of its own, since no model without row i depends on the label that is asked about.

Normalised, the ends of one output, or of one that shares no parameter, are |e_i| (1 + h) / (P_i -+ sign(e_i) c_i) with
the P_i of studentized scores: the changepoints of absolute residuals (`fullcp.influence`), one on each side of f. So
are the ranks, and as many ends lie on the label's side of f and beyond it as rows count for it. There the pruned engine
of full conformal prediction has the same intervals and p-values from few rows.
"""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor

from fullcp.curvature import Curvature, points_within
from fullcp.engine import Engine
from fullcp.features import FeatureRows
from fullcp.inputs import check_all_finite
from fullcp.memory import rows_within
from fullcp.regions import absolute_rank, order_statistics

INF = float("inf")


def plus_intervals(lower: Tensor, upper: Tensor, levels: list[Fraction]) -> Tensor:
    """Jackknife+ intervals from lower and upper ends (m, N) of the models' own, which are reordered: (m, 2, L)."""
    N = lower.shape[1]
    ranks = [absolute_rank(level, N) for level in levels]
    low = order_statistics(lower, [N + 1 - k for k in ranks])
    return torch.stack([low, order_statistics(upper, ranks)], dim=1)


def joint_sizes(sizes: Tensor, scales: Tensor) -> Tensor:
    """T_i sigma_o, (N, O), of sizes (N, O) and scales (O,): what every output is given in place of its own size."""
    return (sizes / scales).amax(1, keepdim=True) * scales


def plus_p_values(lower: Tensor, upper: Tensor, f: Tensor, y: Tensor) -> Tensor:
    """(1 + min(#{lower_i <= y}, #{upper_i >= y})) / (N + 1) for labels y (m,), ends relative to f (m,).

    A label is in the interval of level 1 - alpha where this exceeds alpha.
    """
    f, y = f.unsqueeze(1), y.unsqueeze(1)
    fewer = torch.minimum((f + lower <= y).sum(1), (f + upper >= y).sum(1))
    return (1 + fewer).double() / (lower.shape[1] + 1)


class LeaveOneOut:
    """Jackknife+ with a fixed curvature and fixed training residuals.

    Parameters
    ----------
    curvature : H over the training rows.
    features : the training rows.
    e : Tensor (N, O)
        Training residuals.
    slack : Tensor (N, O, O)
        I - V_i. Where one is not positive (approximate curvature only) there is no model without the row, and its ends
        are infinite.
    normalized : whether widths follow the leverage.
    memory : budget in bytes; a quarter of it may hold a block of test x train numbers.
    """

    def __init__(
        self, curvature: Curvature, features: FeatureRows, e: Tensor, slack: Tensor, *, normalized: bool, memory: int
    ):
        self.curvature, self.features, self.e, self.slack = curvature, features, e, slack
        self.normalized = normalized
        N, O = e.shape
        eye = torch.eye(O, dtype=e.dtype, device=e.device)
        self.missing = ~(torch.linalg.eigvalsh(slack)[:, 0] > 0)  # (N,)
        self.inverse = torch.linalg.inv(torch.where(self.missing[:, None, None], eye, slack))  # S_i^-1
        self.q = (self.inverse @ e.unsqueeze(2)).squeeze(2)  # (N, O)
        spread = self.inverse.diagonal(dim1=1, dim2=2).sqrt() if normalized else torch.ones_like(e)
        self.size = self.q.abs() / spread  # |q_i| / sqrt(1 + h_i / (1 - h_i))
        in_flight = 6 * 8 * min(features.chunk, N) * O * O
        self.points = min(
            rows_within(memory // 4, 4 * 8 * N * O + 8 * N * O * O + in_flight, at_most=4096),
            points_within(curvature, features.jacobian, memory // 8),
        )
        self.pruned: Engine | None = None
        if normalized and (O == 1 or curvature.independent) and not bool(self.missing.any()):
            engine = Engine(curvature, features, e, slack, score="studentized", residuals="absolute", memory=memory)
            if engine.prunes:
                self.pruned, self.points = engine, engine.points

    def intervals(self, phi: Tensor, levels: list[Fraction], scales: Tensor | None = None) -> Tensor:
        """Ends of the intervals of m test points phi (m, O, D) relative to the predictions: (m, 2, L, O).

        With scales (O,) they are joint rectangles.
        """
        if self.pruned is not None and scales is None:
            return self.pruned.intervals(phi, levels)
        lower, upper = self._ends(phi, scales)
        return torch.stack([plus_intervals(*ends, levels) for ends in zip(lower, upper, strict=True)], dim=3)

    def p_values(self, phi: Tensor, f: Tensor, y: Tensor, scales: Tensor | None = None) -> Tensor:
        """p-values of labels y (m, O) where f (m, O) is predicted: (m, O), by the ends of each output."""
        if self.pruned is not None and scales is None:
            return self.pruned.p_values(phi, f, y)
        lower, upper = self._ends(phi, scales)
        columns = zip(lower, upper, f.T, y.T, strict=True)
        return torch.stack([plus_p_values(*column) for column in columns], dim=1)

    def _ends(self, phi: Tensor, scales: Tensor | None) -> tuple[Tensor, Tensor]:
        """What each of the N models has for its ends, relative to the predictions with all rows: (O, m, N) each."""
        query = self.curvature.query(phi)
        check_all_finite(None, {"leverages": query.leverage})
        N, O = self.e.shape
        lower = phi.new_empty(O, len(phi), N, dtype=torch.float64)
        upper = torch.empty_like(lower)
        own = 1 + query.leverage.diagonal(dim1=1, dim2=2).T  # (O, m)
        size = self.size if scales is None else joint_sizes(self.size, scales)
        for rows in self.features.slices():
            C = query.cross(rows)  # (m, n, O, O)
            move = torch.einsum("mnop,no->pmn", C, self.q[rows])
            width = size[rows].T.unsqueeze(1)  # (O, 1, n)
            if self.normalized:
                more = torch.einsum("mnop,nor,mnrp->pmn", C, self.inverse[rows], C)
                width = width * more.add_(own.unsqueeze(2)).sqrt_()
            lower[:, :, rows], upper[:, :, rows] = -move - width, width - move
        lower.masked_fill_(self.missing, -INF)
        upper.masked_fill_(self.missing, INF)
        return lower, upper
