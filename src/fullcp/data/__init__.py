"""Data sets, how they are scaled and split."""

from fullcp.data.diabetes import load_diabetes
from fullcp.data.scaling import Standardizer
from fullcp.data.splits import halves, random_splits
from fullcp.data.toy import one_dimensional

__all__ = ["Standardizer", "halves", "load_diabetes", "one_dimensional", "random_splits"]
