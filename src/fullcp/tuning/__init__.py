"""Choosing l2 and the noise: the Laplace marginal likelihood of a trained network."""

from fullcp.tuning.evidence import Evidence
from fullcp.tuning.posthoc import Tuning, settle, tune, tuning_facts, tuning_from

__all__ = ["Evidence", "Tuning", "settle", "tune", "tuning_facts", "tuning_from"]
