"""The convolutional part of VGG-19 in plain PyTorch, with the names that torchvision gives its weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

# Channels of the 3 x 3 convolutions; 0 is a 2 x 2 maximum.
_VGG19 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 256, 0, 512, 512, 512, 512, 0, 512, 512, 512, 512, 0)
_PREFIX = "features."
# What the weights of torchvision were trained on: means and deviations of red, green and blue in [0, 1].
IMAGENET_MEAN, IMAGENET_SCALE = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def normalized(images: Tensor) -> Tensor:
    """Images (n, 3, S, S) in uint8 as networks trained on ImageNet want them."""
    mean, scale = (torch.tensor(v, device=images.device).view(3, 1, 1) for v in (IMAGENET_MEAN, IMAGENET_SCALE))
    return (images / 255 - mean) / scale


class VGG19Features(nn.Module):
    """Normalised images (n, 3, S, S) to feature maps (n, 512, S / 32, S / 32), 16 convolutions deep.

    Weights are random until `load_vgg19` fills them.
    """

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for width in _VGG19:
            if width:
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
                channels = width
            else:
                layers.append(nn.MaxPool2d(2, 2))
        self.features = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Feature maps."""
        return self.features(x)


def load_vgg19(path: str | os.PathLike[str]) -> VGG19Features:
    """VGG-19 features with the weights of a file, in float32.

    Parameters
    ----------
    path : a safetensors file (`vgg19_features_fp16.safetensors`), or a state that torchvision's VGG-19 was saved to
        (`vgg19-dcbb9e9d.pth`); what a file holds of the classifier is left out.

    Raises
    ------
    ValueError
        With the file's name, where weights are missing or of other shapes.
    """
    model = VGG19Features()
    state = {name: value for name, value in _read(Path(path)).items() if name.startswith(_PREFIX)}
    expected = model.state_dict()
    wrong = [name for name, value in expected.items() if name not in state or state[name].shape != value.shape]
    if wrong or len(state) != len(expected):
        what = f"{wrong[0]} is missing or of another shape" if wrong else "it has more layers"
        raise ValueError(f"path does not hold the features of VGG-19, {what}: {path}")
    model.load_state_dict({name: value.float() for name, value in state.items()})
    return model


def balance(model: VGG19Features, x: Tensor) -> VGG19Features:
    """Rescale convolutions so that what each gives has root mean square 1 on the normalised images x (n, 3, S, S).

    The features stay the same but for one factor, since ReLU and maxima let positive factors through. Weights that were
    trained on pixels up to 255 give numbers in the thousands, with which a step of the size that suits one layer is far
    too long for another.
    """
    before = torch.ones((), dtype=x.dtype, device=x.device)  # what the layer's input was divided by
    with torch.no_grad():
        for layer in model.features:
            if isinstance(layer, nn.Conv2d):
                assert layer.bias is not None
                found = torch.relu(nn.functional.conv2d(x, layer.weight * before, layer.bias, padding=1))
                size = found.square().mean().sqrt()
                if not size > 0:
                    raise ValueError("x leaves a layer of the backbone without any output: other images are needed")
                layer.weight.mul_(before / size)
                layer.bias.div_(size)
                before = size
            x = layer(x)
    return model


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise ValueError(f"path is no file: {path}")
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    try:
        state: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling fails in many ways
        raise ValueError(f"path cannot be read as weights: {path} ({error})") from error
    if not isinstance(state, dict):
        raise ValueError(f"path holds a {type(state).__name__}, a state dict is wanted: {path}")
    return state
