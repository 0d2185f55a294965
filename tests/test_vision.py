"""Detectors on images drawn here: VGG-19's weights and scales, training whole and in ensembles, bad input."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fullcp.data import drawn_boxes, flip_boxes
from fullcp.vision import (
    BoxHeads,
    Detector,
    Recipe,
    VGG19Features,
    apply_heads,
    balance,
    detection_loss,
    finetune,
    load_vgg19,
    normalized,
    outputs,
    pooled_features,
    train_heads,
)
from fullcp.vision import vgg as vgg_module

SMALL = (4, 4, 0, 6, 6, 0, 8)  # the plan of a network like VGG-19, in small


def tiny(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(6, 5, 3, padding=1), nn.ReLU())


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(vgg_module, "_VGG19", SMALL)


def test_vgg19_has_the_layers_and_names_of_torchvision():
    with torch.device("meta"):
        model = VGG19Features()
    convolutions = {name: m for name, m in model.features.named_children() if isinstance(m, nn.Conv2d)}
    # From torchvision's configuration E: the places of convolutions, and what goes in and out.
    assert [int(name) for name in convolutions] == [0, 2, 5, 7, 10, 12, 14, 16, 19, 21, 23, 25, 28, 30, 32, 34]
    assert [m.out_channels for m in convolutions.values()] == [64] * 2 + [128] * 2 + [256] * 4 + [512] * 8
    assert [name for name, m in model.features.named_children() if isinstance(m, nn.MaxPool2d)] == [
        "4",
        "9",
        "18",
        "27",
        "36",
    ]
    assert sum(p.numel() for p in model.parameters()) == 20_024_384
    assert {"features.0.weight", "features.34.bias"} <= set(model.state_dict())
    assert model(torch.empty(2, 3, 224, 224, device="meta")).shape == (2, 512, 7, 7)


def test_weights_from_files(small, tmp_path):
    torch.manual_seed(1)
    model = VGG19Features()
    state = model.state_dict()
    save_file({name: value.half() for name, value in state.items()}, tmp_path / "half.safetensors")
    torch.save({**state, "classifier.0.weight": torch.zeros(3, 3)}, tmp_path / "all.pth")
    for name, precision in (("half.safetensors", torch.half), ("all.pth", torch.float)):
        loaded = load_vgg19(tmp_path / name)
        for key, value in loaded.state_dict().items():
            assert value.dtype == torch.float32
            assert torch.equal(value, state[key].to(precision).float())
    for content, words in (
        ({name: value for name, value in state.items() if name != "features.5.bias"}, r"features\.5\.bias is missing"),
        ({**state, "features.5.bias": torch.zeros(3)}, r"features\.5\.bias is missing or of another shape"),
        ({**state, "features.99.bias": torch.zeros(3)}, "it has more layers"),
    ):
        save_file(content, tmp_path / "bad.safetensors")
        with pytest.raises(ValueError, match=f"features of VGG-19, {words}.*bad.safetensors"):
            load_vgg19(tmp_path / "bad.safetensors")
    (tmp_path / "noise.pth").write_bytes(b"noise")
    with pytest.raises(ValueError, match=r"cannot be read as weights: .*noise.pth"):
        load_vgg19(tmp_path / "noise.pth")
    torch.save(torch.zeros(3), tmp_path / "tensor.pth")
    with pytest.raises(ValueError, match="holds a Tensor, a state dict is wanted"):
        load_vgg19(tmp_path / "tensor.pth")
    with pytest.raises(ValueError, match="path is no file"):
        load_vgg19(tmp_path / "nothing.pth")


def test_balanced_layers_give_the_same_features_but_for_a_factor(small):
    torch.manual_seed(2)
    model = VGG19Features().double()
    with torch.no_grad():
        for i, layer in enumerate(m for m in model.features if isinstance(m, nn.Conv2d)):
            layer.weight.mul_(10.0 ** (i - 1))
            layer.bias.add_(10.0**i)
    x = normalized(drawn_boxes(8, size=16).images).double()
    before = model(x).detach()
    after = balance(model, x)(x).detach()
    factor = (after * before).sum() / before.square().sum()
    torch.testing.assert_close(after, factor * before, rtol=1e-9, atol=1e-12)
    for layer in model.features:
        x = layer(x)
        if isinstance(layer, nn.ReLU):
            assert x.square().mean().sqrt().item() == pytest.approx(1.0)
    dead = VGG19Features()
    with torch.no_grad():
        next(iter(dead.features)).bias.fill_(-1e9)
    with pytest.raises(ValueError, match="without any output"):
        balance(dead, normalized(drawn_boxes(2, size=16).images))


def test_images_are_normalised_as_imagenet():
    images = torch.tensor([0, 128, 255], dtype=torch.uint8).view(1, 3, 1, 1)
    expected = [(0 - 0.485) / 0.229, (128 / 255 - 0.456) / 0.224, (1 - 0.406) / 0.225]
    torch.testing.assert_close(normalized(images).flatten(), torch.tensor(expected))


def test_rates_rise_and_fall():
    recipe = Recipe(epochs=200, warm_up=5, learning_rate=0.01)
    rates = [recipe.rate(step, 10) for step in range(2000)]
    assert rates[:3] == pytest.approx([0.01 / 50, 0.02 / 50, 0.03 / 50])
    assert rates[49] == pytest.approx(0.01)
    assert rates[50] == pytest.approx(0.01)
    assert rates[50 + 975] == pytest.approx(0.005, rel=1e-2)
    assert rates[-1] < 1e-7
    assert all(a >= b for a, b in pairwise(rates[50:]))
    assert Recipe(epochs=3).rate(0, 10) == 0.01  # too short to warm up
    with pytest.raises(ValueError, match="learning_rate must be positive"):
        Recipe(learning_rate=0.0)
    with pytest.raises(ValueError, match="epochs must be"):
        Recipe(epochs=0)


def test_loss_by_hand():
    found, logits = torch.tensor([[0.0, 0.0, 0.5, 3.0], [1.0, 1.0, 1.0, 1.0]]), torch.tensor([2.0, -1.0])
    targets, classes = torch.tensor([[0.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]]), torch.tensor([1, 1])
    smooth = (0.5 + 0.125 + 2.5) / 8
    logistic = (math.log1p(math.exp(-2)) + math.log1p(math.exp(1))) / 2
    assert detection_loss(found, logits, targets, classes).item() == pytest.approx(smooth + logistic)


def trained(recipe, seed=0, rows=120, **options):
    data = drawn_boxes(160, size=24, seed=1)
    detector = Detector(tiny(), 24, pool=6, trunk=(24, 16), dropout=0.0)
    center, scale = data.boxes[:rows].mean(0), data.boxes[:rows].std(0)
    loss = finetune(
        detector,
        data.images,
        data.boxes,
        data.classes,
        torch.arange(rows),
        center=center,
        scale=scale,
        recipe=recipe,
        seed=seed,
        **options,
    )
    return detector, loss, data, center, scale


def test_finetuning_learns_and_can_be_repeated():
    recipe = Recipe(epochs=40, batch_size=32, learning_rate=0.05)
    detector, loss, data, center, scale = trained(recipe)
    again, same, *_ = trained(recipe)
    assert loss == same
    assert all(torch.equal(a, b) for a, b in zip(detector.parameters(), again.parameters()))
    assert not detector.training
    z, logits = outputs(detector, data.images)
    with torch.no_grad():
        boxes, direct = detector(data.images)
    torch.testing.assert_close(detector.heads.box(z), boxes)
    torch.testing.assert_close(logits, direct)
    test = slice(120, None)
    errors = (boxes[test] * scale + center - data.boxes[test]).abs().mean()
    blind = (center - data.boxes[test]).abs().mean()
    assert errors < 0.75 * blind
    assert ((logits[test] > 0) == (data.classes[test] == 1)).float().mean() > 0.9
    assert all(not torch.equal(a, b) for a, b in zip(tiny().parameters(), detector.backbone.parameters()))


def test_a_step_is_plain_sgd():
    """One full batch without flips: Nesterov's first step by hand, weight decay included."""
    recipe = Recipe(epochs=1, batch_size=500, learning_rate=0.02, flips=False)
    detector, _, data, center, scale = trained(recipe)
    plain = Detector(tiny(), 24, pool=6, trunk=(24, 16), dropout=0.0)
    boxes, logits = plain(data.images[:120])
    detection_loss(boxes, logits, (data.boxes[:120] - center) / scale, data.classes[:120]).backward()
    for moved, p in zip(detector.parameters(), plain.parameters()):
        step = 0.02 * 1.9 * (p.grad + 5e-4 * p)
        torch.testing.assert_close(moved, p - step, rtol=1e-4, atol=1e-6)


def test_divergence_is_told():
    with pytest.raises(RuntimeError, match="training of seed 3 diverged in epoch"):
        trained(Recipe(epochs=5, batch_size=8, learning_rate=1e12), name="seed 3")


def test_heads_trained_together_are_those_trained_alone():
    data = drawn_boxes(120, size=24, seed=1)
    detector = Detector(tiny(), 24, pool=6)
    features, flipped = (pooled_features(detector, data.images, flipped=flip) for flip in (False, True))
    with torch.no_grad():
        torch.testing.assert_close(flipped, detector.features(data.images.flip(3)))
    rows = torch.stack([torch.arange(90), torch.arange(30, 120)])
    units = [(data.boxes[each].mean(0), data.boxes[each].std(0)) for each in rows]
    centers, scales = (torch.stack(each) for each in zip(*units))
    recipe = Recipe(epochs=6, batch_size=32, learning_rate=0.05)

    def fit(which, recipe=recipe):
        return train_heads(
            features,
            flipped,
            data.boxes,
            data.classes,
            rows[which],
            centers=centers[which],
            scales=scales[which],
            seeds=[[3, 8][k] for k in which],
            recipe=recipe,
            trunk=(20, 12),
            drop=0.0,
        )

    together = fit([0, 1])
    for k in range(2):
        (alone,) = fit([k])
        for a, b in zip(together[k].parameters(), alone.parameters()):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    # One full batch by hand, with plain modules.
    (stepped,) = fit([1], Recipe(epochs=1, batch_size=500, learning_rate=0.02, flips=False))
    torch.manual_seed(8)
    plain = BoxHeads(features.shape[1], (20, 12), dropout=0.0)
    found, logits = plain(features[rows[1]])
    detection_loss(found, logits, (data.boxes[rows[1]] - centers[1]) / scales[1], data.classes[rows[1]]).backward()
    for moved, p in zip(stepped.parameters(), plain.parameters()):
        torch.testing.assert_close(moved, p - 0.02 * 1.9 * (p.grad + 5e-4 * p), rtol=1e-4, atol=1e-6)
    z, logits = apply_heads(stepped, features)
    torch.testing.assert_close(stepped(features)[1], logits)
    torch.testing.assert_close(stepped.embed(features), z)
    with pytest.raises(RuntimeError, match="member 3, member 8 diverged in epoch"):
        fit([0, 1], Recipe(epochs=3, batch_size=8, learning_rate=1e12))


def test_flipped_features_train_towards_flipped_boxes():
    """Images whose flip is themselves, with boxes in the middle after a flip: the heads must find the mean of both."""
    features = torch.eye(6)
    boxes = torch.tensor([[0.1, 0.2, 0.5, 0.6]]).expand(6, 4).clone()
    (member,) = train_heads(
        features,
        features,
        boxes,
        torch.zeros(6, dtype=torch.long),
        torch.arange(6)[None],
        centers=torch.zeros(1, 4),
        scales=torch.ones(1, 4),
        seeds=[0],
        recipe=Recipe(epochs=400, batch_size=6, learning_rate=0.1, weight_decay=0.0),
        trunk=(16, 16),
        drop=0.0,
    )
    middle = (boxes + flip_boxes(boxes)) / 2
    torch.testing.assert_close(member(features)[0], middle, rtol=0, atol=0.06)


def test_backbones_must_give_maps():
    with pytest.raises(ValueError, match=r"backbone must give feature maps \(n, C, h, w\), got \(1, 3072\)"):
        Detector(nn.Flatten(), 32)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_training_on_a_gpu():
    """bfloat16 there, float32 here: the losses agree to the second digit."""
    data = drawn_boxes(200, size=32, seed=1)
    losses = []
    for device in ("cpu", "cuda"):
        detector = Detector(tiny().to(device), 32, pool=8, trunk=(24, 16), dropout=0.0)
        images, boxes, classes = (t.to(device) for t in (data.images, data.boxes, data.classes))
        recipe = Recipe(epochs=20, batch_size=32, learning_rate=0.05, flips=False)
        rows = torch.arange(200, device=device)
        center, scale = boxes.mean(0), boxes.std(0)
        losses.append(
            finetune(detector, images, boxes, classes, rows, center=center, scale=scale, recipe=recipe, seed=0)
        )
        features = pooled_features(detector, images)
        assert features.dtype == (torch.float16 if device == "cuda" else torch.float32)
        members = train_heads(
            features,
            None,
            boxes,
            classes,
            rows[None],
            centers=center[None],
            scales=scale[None],
            seeds=[0],
            recipe=recipe,
            trunk=(24, 16),
        )
        assert apply_heads(members[0], features)[0].device.type == device
    assert losses[1] == pytest.approx(losses[0], rel=0.3)
