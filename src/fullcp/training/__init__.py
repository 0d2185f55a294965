"""Training: the paper's network and recipe, for one network or for many at once."""

from fullcp.training.grid import GridSearch, grid_search
from fullcp.training.losses import PinballLoss
from fullcp.training.networks import mlp, replicate
from fullcp.training.online import Schedule
from fullcp.training.trainer import DivergenceWarning, Training, train, train_ensemble

__all__ = [
    "DivergenceWarning",
    "GridSearch",
    "PinballLoss",
    "Schedule",
    "Training",
    "grid_search",
    "mlp",
    "replicate",
    "train",
    "train_ensemble",
]
