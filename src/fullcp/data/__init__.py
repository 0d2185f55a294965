"""Data sets, how they are scaled and split."""

from fullcp.data.boxes import BoxImages, drawn_boxes, flip, flip_boxes, overlap
from fullcp.data.diabetes import load_diabetes
from fullcp.data.download import DataUnavailableError
from fullcp.data.pets import load_packed, load_pets, pack_pets
from fullcp.data.scaling import Standardizer
from fullcp.data.splits import cross_validation, halves, random_splits
from fullcp.data.table import Table
from fullcp.data.tables import load_table
from fullcp.data.toy import one_dimensional
from fullcp.data.uci import DATASETS, DataSet, load_dataset

__all__ = [
    "DATASETS",
    "BoxImages",
    "DataSet",
    "DataUnavailableError",
    "Standardizer",
    "Table",
    "cross_validation",
    "drawn_boxes",
    "flip",
    "flip_boxes",
    "halves",
    "load_dataset",
    "load_diabetes",
    "load_packed",
    "load_pets",
    "load_table",
    "one_dimensional",
    "overlap",
    "pack_pets",
    "random_splits",
]
