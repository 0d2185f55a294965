"""Tuning l2 and noise while the networks train, by the Laplace marginal likelihood."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """When to tune."""

    burn_in: int = 100


class OnlineTuning:
    patience = None
