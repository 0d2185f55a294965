"""Choosing l2 and the noise: the Laplace marginal likelihood of a trained network, or of networks in training."""

from fullcp.tuning.ascent import Ascent
from fullcp.tuning.builders import evidence_of, evidence_of_many
from fullcp.tuning.evidence import Evidence, Value
from fullcp.tuning.forms import Form, Gram, Kernels, Repeated, Spectral, WithRest
from fullcp.tuning.posthoc import Tuning, settle, tune, tuning_facts, tuning_from

__all__ = [
    "Ascent",
    "Evidence",
    "Form",
    "Gram",
    "Kernels",
    "Repeated",
    "Spectral",
    "Tuning",
    "Value",
    "WithRest",
    "evidence_of",
    "evidence_of_many",
    "settle",
    "tune",
    "tuning_facts",
    "tuning_from",
]
