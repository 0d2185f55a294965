"""Training the heads of many detectors at once, on features of one frozen backbone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

from fullcp.data.boxes import flip_boxes
from fullcp.progress import track
from fullcp.vision.detector import BoxHeads, seeded
from fullcp.vision.recipe import Recipe, check_converging, detection_loss


def train_heads(
    features: Tensor,
    flipped: Tensor | None,
    boxes: Tensor,
    classes: Tensor,
    rows: Tensor,
    *,
    centers: Tensor,
    scales: Tensor,
    seeds: Sequence[int],
    recipe: Recipe,
    trunk: Sequence[int] = (4096, 4096),
    drop: float = 0.5,
) -> list[BoxHeads]:
    """K pairs of heads, each trained on rows of its own: one product of stacked matrices a layer serves all.

    Parameters
    ----------
    features : Tensor (n, F)
        Features of all images.
    flipped : Tensor (n, F) or None
        Those of the images flipped from left to right; None trains without flips.
    boxes, classes : Tensor (n, 4), (n,)
        Boxes as shares of the image's sides.
    rows : Tensor (K, N)
        Which images each member is trained on.
    centers, scales : Tensor (K, 4)
        Means and deviations that standardise boxes, by member.
    seeds : K seeds of first weights and of the order of images. Dropout draws from the first for all.
    """
    K, N = rows.shape
    if len(seeds) != K:
        raise ValueError(f"seeds must be {K}, one a member, got {len(seeds)}")
    device, n = features.device, len(features)
    members = []
    for seed in seeds:
        with seeded(seed, device), device:  # weights of hundreds of millions are drawn where they are wanted
            members.append(BoxHeads(features.shape[1], trunk, dropout=drop))
    stacked = {
        name: torch.stack([dict(member.named_parameters())[name].detach() for member in members])
        for name, _ in members[0].named_parameters()
    }
    for value in stacked.values():
        value.requires_grad_()
    # Flipped images stand behind the others; a flip adds n to the row's number.
    flips = recipe.flips and flipped is not None
    source = torch.cat([features, flipped]) if flips and flipped is not None else features
    both = torch.cat([boxes, flip_boxes(boxes)])
    optimizer = recipe.optimizer(list(stacked.values()))
    orders = [torch.Generator().manual_seed(seed) for seed in seeds]
    steps = -(-N // recipe.batch_size)
    with seeded(seeds[0], device):
        for epoch in track(range(recipe.epochs), f"training {K} heads", recipe.epochs):
            shuffled = torch.stack([torch.randperm(N, generator=order) for order in orders])
            sides = torch.stack([torch.randint(2 if flips else 1, (N,), generator=order) for order in orders])
            which = rows.gather(1, shuffled.to(device)) + n * sides.to(device)
            total = torch.zeros(K, device=device)
            for step, batch in enumerate(torch.split(which, recipe.batch_size, dim=1)):
                for group in optimizer.param_groups:
                    group["lr"] = recipe.rate(epoch * steps + step, steps)
                with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                    found, logits = _forward(stacked, source[batch], len(trunk), drop)
                targets = (both[batch] - centers[:, None]) / scales[:, None]
                losses = detection_loss(found, logits, targets, classes[batch % n])
                optimizer.zero_grad()
                torch.autograd.backward(losses.sum())
                optimizer.step()
                total += losses.detach() * batch.shape[1]
            check_converging((total / N).cpu(), epoch, [f"member {seed}" for seed in seeds])
    for k, member in enumerate(members):
        member.load_state_dict({name: value[k].detach() for name, value in stacked.items()})
        member.eval()
    return members


def _forward(stacked: dict[str, Tensor], x: Tensor, depth: int, drop: float) -> tuple[Tensor, Tensor]:
    """What `BoxHeads` does in training, for features (K, B, F): boxes (K, B, 4) and logits (K, B)."""

    def linear(name: str, x: Tensor) -> Tensor:
        weight, bias = stacked[f"{name}.weight"], stacked[f"{name}.bias"]
        return torch.baddbmm(bias.unsqueeze(1), x.to(weight.dtype) if not x.is_cuda else x, weight.mT)

    for i in range(depth):
        x = dropout(torch.relu(linear(f"trunk.{i}", x)), drop)
    return linear("box", x), linear("label", x)[..., 0]


def apply_heads(member: nn.Module, features: Tensor, *, batch: int = 1024) -> tuple[Tensor, Tensor]:
    """What goes into the heads, z (n, p), and the logit of a dog (n,), in float32."""
    assert isinstance(member, BoxHeads)
    embedded, logits = [], []
    with torch.inference_mode():
        for x in torch.split(features, batch):
            z = member.embed(x.float())
            embedded.append(z)
            logits.append(member.label(z)[:, 0])
    return torch.cat(embedded).clone(), torch.cat(logits).clone()
