"""Networks of a number and of quantiles in one ensemble train as they would apart."""

from __future__ import annotations

import torch

from fullcp.experiments.mixed import NUMBER, QUANTILES, MixedLoss, narrowed, widened
from fullcp.training import PinballLoss, mlp, replicate, train_ensemble

TAUS = (0.05, 0.5, 0.95)


def test_a_mixed_ensemble_trains_each_network_as_alone():
    torch.manual_seed(0)
    X = torch.randn(70, 3, dtype=torch.float64)
    y = X.sum(1, keepdim=True) + 0.3 * torch.randn(70, 1, dtype=torch.float64)
    short = X[:40], y[:40]

    def numbers():
        return [model.double() for model in replicate(lambda: mlp(3, (8,)), [1, 2])]

    def quantiles():
        return [model.double() for model in replicate(lambda: mlp(3, (8,), outputs=3), [3])]

    recipe = {"epochs": 30, "batch_size": 32}
    alone, quantile = numbers(), quantiles()
    train_ensemble(alone, [(X, y), short], l2=[0.1, 2.0], seed=[4, 5], **recipe)
    train_ensemble(quantile, (X, y), l2=0.3, seed=[6], loss=PinballLoss(TAUS), **recipe)

    small, wide = numbers(), quantiles()
    together = [*(widened(model, mlp(3, (8,), outputs=3).double()) for model in small), *wide]

    def marked(rows, kind):
        return rows[0], torch.cat([rows[1], torch.full_like(rows[1], kind)], 1)

    data = [marked((X, y), NUMBER), marked(short, NUMBER), marked((X, y), QUANTILES)]
    train_ensemble(together, data, l2=[0.1, 2.0, 0.3], seed=[4, 5, 6], loss=MixedLoss(TAUS), **recipe)
    for trained, model in zip(together, small):
        assert all((p[1:] == 0).all() for p in trained[-1].parameters())
        narrowed(trained, model)
    for found, expected in zip([*small, *wide], [*alone, *quantile]):
        for p, q in zip(found.parameters(), expected.parameters()):
            torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)
