"""Training a detector whole, backbone and heads, with all images on its device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fullcp.data.boxes import flip
from fullcp.progress import track
from fullcp.vision.detector import Detector, seeded
from fullcp.vision.recipe import Recipe, check_converging, detection_loss


def finetune(
    detector: Detector,
    images: Tensor,
    boxes: Tensor,
    classes: Tensor,
    rows: Tensor,
    *,
    center: Tensor,
    scale: Tensor,
    recipe: Recipe,
    seed: int = 0,
    name: str = "the detector",
) -> float:
    """Train on the images that `rows` lists, and return the mean loss of the last epoch.

    Convolutions and products are in bfloat16 on a GPU, weights and losses in float32.

    Parameters
    ----------
    images, boxes, classes : Tensor (n, 3, S, S) uint8, (n, 4), (n,)
        All images, on the detector's device; boxes as shares of the image's sides.
    rows : Tensor (N,)
    center, scale : Tensor (4,)
        Means and deviations that standardise boxes.
    seed : of the order of images, of flips and of dropout.
    """
    device = images.device
    on_gpu = device.type == "cuda"
    optimizer = recipe.optimizer(list(detector.parameters()))
    if on_gpu:
        detector.backbone.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    steps = -(-len(rows) // recipe.batch_size)
    mean = torch.full((1,), float("nan"))
    detector.train()
    with seeded(seed, device), _tuned(on_gpu):
        for epoch in track(range(recipe.epochs), f"training {name}", recipe.epochs):
            order = rows[torch.randperm(len(rows), device=device)]
            total = torch.zeros(1, device=device)
            for step, batch in enumerate(torch.split(order, recipe.batch_size)):
                _set_rate(optimizer, recipe.rate(epoch * steps + step, steps))
                x, box = images[batch], boxes[batch]
                if recipe.flips:
                    x, box = flip(x, box, torch.rand(len(batch), device=device) < 0.5)
                with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
                    found, logits = detector(x)
                loss = detection_loss(found, logits, (box - center) / scale, classes[batch])
                optimizer.zero_grad()
                torch.autograd.backward(loss)
                optimizer.step()
                total += loss.detach() * len(batch)
            mean = (total / len(rows)).cpu()
            check_converging(mean, epoch, [name])
    detector.eval()
    return float(mean)


def pooled_features(detector: Detector, images: Tensor, *, flipped: bool = False, batch: int = 128) -> Tensor:
    """Features of the backbone for all images, (n, F): float16 on a GPU, to train heads on, else float32."""
    on_gpu = images.is_cuda
    parts = []
    detector.eval()
    starts = range(0, len(images), batch)
    with torch.inference_mode(), torch.autocast(images.device.type, torch.bfloat16, enabled=on_gpu):
        for start in track(starts, "features of the backbone", len(starts)):
            x = images[start : start + batch]
            found = detector.features(x.flip(3) if flipped else x)
            parts.append(found.half() if on_gpu else found)
    return torch.cat(parts).clone()


def outputs(detector: Detector, images: Tensor, *, batch: int = 128) -> tuple[Tensor, Tensor]:
    """What goes into the heads, z (n, p), and the logit of a dog (n,), in float32."""
    embedded, logits = [], []
    detector.eval()
    with torch.inference_mode():
        for x in torch.split(images, batch):
            z = detector.embed(x)
            embedded.append(z)
            logits.append(detector.heads.label(z)[:, 0])
    return torch.cat(embedded).clone(), torch.cat(logits).clone()


def _set_rate(optimizer: torch.optim.SGD, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


@contextmanager
def _tuned(on_gpu: bool) -> Iterator[None]:
    """Let cuDNN try which of its convolutions is fastest: shapes hardly change."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = before or on_gpu
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
