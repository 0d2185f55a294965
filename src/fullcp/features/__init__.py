"""phi: per-sample gradients of a module, in row chunks."""

from fullcp.features.jacobian import Jacobian
from fullcp.features.kernels import KernelRows, kernel_rows
from fullcp.features.network import Network
from fullcp.features.perturbed import PerturbedNetwork
from fullcp.features.products import gram_block_product, gram_product, residual_product
from fullcp.features.rows import FeatureRows, RowIndex
from fullcp.features.subset import select_parameters
from fullcp.features.whitened import WhitenedJacobian

__all__ = [
    "FeatureRows",
    "Jacobian",
    "KernelRows",
    "Network",
    "PerturbedNetwork",
    "RowIndex",
    "WhitenedJacobian",
    "gram_block_product",
    "gram_product",
    "kernel_rows",
    "residual_product",
    "select_parameters",
]
