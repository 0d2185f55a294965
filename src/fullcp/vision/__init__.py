"""Networks for images with a box: VGG-19, detectors, and how they are trained."""

from fullcp.vision.detector import BoxHeads, Detector, seeded, small_backbone
from fullcp.vision.finetune import finetune, outputs, pooled_features
from fullcp.vision.heads import apply_heads, train_heads
from fullcp.vision.recipe import DivergedError, Recipe, detection_loss
from fullcp.vision.vgg import VGG19Features, balance, load_vgg19, normalized

__all__ = [
    "BoxHeads",
    "Detector",
    "DivergedError",
    "Recipe",
    "VGG19Features",
    "apply_heads",
    "balance",
    "detection_loss",
    "finetune",
    "load_vgg19",
    "normalized",
    "outputs",
    "pooled_features",
    "seeded",
    "small_backbone",
    "train_heads",
]
