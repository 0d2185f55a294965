"""What layers such as dropout draw in training comes from the seed alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fullcp.training import checkpoint as checkpoint_module
from fullcp.training import replicate, train_ensemble
from fullcp.training import trainer as trainer_module
from test_ensemble import InterruptionError, data, flat


class Noisy(nn.Module):
    """Noise in training."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 1)

    def forward(self, x):
        return self.inner(x + torch.randn_like(x) if self.training else x)


DRAWING = {
    "side by side": lambda: nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double(),
    "one by one": lambda: nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1)).double(),
    "noise": lambda: Noisy().double(),
}


@pytest.mark.parametrize("make", DRAWING.values(), ids=DRAWING)
def test_a_seed_fixes_what_layers_draw(make, tmp_path, monkeypatch):
    ends = []
    for seed, count in ((0, 1), (0, 1), (1, 1), (0, 3), (0, 3)):
        torch.randn(len(ends) + 1)
        state = torch.get_rng_state()
        models = replicate(make, range(count))
        runs = train_ensemble(models, data(30), epochs=6, batch_size=16, seed=seed)
        assert torch.equal(state, torch.get_rng_state())
        ends.append((torch.stack([flat(model) for model in models]), runs[0].losses))
    assert torch.equal(ends[0][0], ends[1][0])
    assert not torch.allclose(ends[0][0], ends[2][0])
    assert torch.equal(ends[3][0], ends[4][0])
    # Each epoch draws anew, whatever happened in between: an interruption too.
    monkeypatch.setattr(checkpoint_module, "_EVERY", 0.0)
    genuine = trainer_module.track

    def stops(steps, description, total):
        for i, step in enumerate(genuine(steps, description, total)):
            if i == 3:
                raise InterruptionError
            yield step

    monkeypatch.setattr(trainer_module, "track", stops)
    recipe = {"epochs": 6, "batch_size": 16, "seed": 0, "checkpoint": tmp_path / "run"}
    with pytest.raises(InterruptionError):
        train_ensemble(replicate(make, range(3)), data(30), **recipe)
    monkeypatch.setattr(trainer_module, "track", genuine)
    models = replicate(make, range(3))
    assert train_ensemble(models, data(30), **recipe)[0].losses == ends[3][1]
    assert torch.equal(torch.stack([flat(model) for model in models]), ends[3][0])


def test_masks_differ_between_epochs_and_networks():
    model = nn.Sequential(nn.Linear(3, 1), nn.Dropout(0.5))
    models = replicate(lambda: copy.deepcopy(model), range(3))
    X, y = (part.float() for part in data(30))
    runs = train_ensemble(models, (X, y), epochs=5, learning_rate=(1e-12, 1e-12), seed=[0, 0, 0])
    assert len({loss for run in runs for loss in run.losses}) == 15
