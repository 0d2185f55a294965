"""Training: the paper's network and recipe."""

from fullcp.training.networks import mlp
from fullcp.training.trainer import train

__all__ = ["mlp", "train"]
