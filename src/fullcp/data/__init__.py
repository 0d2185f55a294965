"""Data sets, how they are scaled and split."""

from fullcp.data.boxes import BoxImages, drawn_boxes, flip, flip_boxes, overlap
from fullcp.data.diabetes import load_diabetes
from fullcp.data.pets import load_packed, load_pets, pack_pets
from fullcp.data.scaling import Standardizer
from fullcp.data.splits import halves, random_splits
from fullcp.data.toy import one_dimensional

__all__ = [
    "BoxImages",
    "Standardizer",
    "drawn_boxes",
    "flip",
    "flip_boxes",
    "halves",
    "load_diabetes",
    "load_packed",
    "load_pets",
    "one_dimensional",
    "overlap",
    "pack_pets",
    "random_splits",
]
