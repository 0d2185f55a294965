"""Hypothesis without deadlines, and with the same examples in every run."""

from hypothesis import settings

settings.register_profile("fullcp", deadline=None, derandomize=True)
settings.load_profile("fullcp")
