"""Reading the pet images: a folder drawn here, files of all kinds, bad ones, and the real set where it is present."""

from __future__ import annotations

import builtins
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fullcp.data import drawn_boxes, flip, flip_boxes, load_packed, load_pets, overlap, pack_pets
from fullcp.data.boxes import CAT, DOG

XML = """<annotation><size><width>{w}</width><height>{h}</height><depth>3</depth></size>{objects}</annotation>"""
OBJECT = (
    "<object><name>cat</name><bndbox><xmin>{}</xmin><ymin>{}</ymin><xmax>{}</xmax><ymax>{}</ymax></bndbox></object>"
)


def write(folder, name, box=(10, 20, 30, 60), size=(40, 80), mode="RGB", kind="JPEG", more=()):
    """An image with a bright box on black, and its annotation."""
    pixels = np.zeros((size[1], size[0]), np.uint8)
    left, top, right, bottom = (int(edge) for edge in box)
    pixels[top:bottom, left:right] = 255
    image = Image.fromarray(pixels).convert(mode)
    image.save(folder / "images" / f"{name}.jpg", kind)
    objects = "".join(OBJECT.format(*each) for each in (box, *more))
    (folder / "annotations" / "xmls" / f"{name}.xml").write_text(XML.format(w=size[0], h=size[1], objects=objects))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "annotations" / "xmls").mkdir(parents=True)
    write(tmp_path, "Abyssinian_1")
    write(tmp_path, "beagle_2", box=(0, 0, 20, 40))
    return tmp_path


def test_images_boxes_and_species(folder):
    (folder / "images" / "Bombay_3.jpg").write_bytes(b"an image without a box is not asked for")
    data = load_pets(folder, size=32)
    assert data.names == ["Abyssinian_1", "beagle_2"]
    assert data.images.shape == (2, 3, 32, 32)
    assert data.images.dtype == torch.uint8
    assert data.classes.tolist() == [CAT, DOG]
    torch.testing.assert_close(data.boxes, torch.tensor([[0.25, 0.25, 0.75, 0.75], [0.0, 0.0, 0.5, 0.5]]))
    for image, box in zip(data.images, data.boxes):  # resizing takes the box along: bright inside, dark outside
        left, top, right, bottom = (box * 32).round().int().tolist()
        inside = image[:, top + 1 : bottom - 1, left + 1 : right - 1].float().mean()
        assert inside > 240
        assert image.float().mean() < 1.1 * 255 * (right - left) * (bottom - top) / 32**2
    assert load_pets(folder, size=32, names=["beagle_2"]).names == ["beagle_2"]


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "P", "CMYK", "LA", "1"])
def test_kinds_of_images(folder, mode):
    kind = "JPEG" if mode in ("L", "RGB", "CMYK") else "PNG"  # by content, whatever the name says
    write(folder, "Abyssinian_1", mode=mode, kind=kind)
    image = load_pets(folder, size=40).images[0]
    assert image.shape == (3, 40, 40)
    assert image[:, 15:25, 15:25].float().mean() > 240
    assert image[:, :5].float().mean() < 10


def test_images_of_sixteen_bits_are_not_all_white(folder):
    ramp = np.linspace(0, 65535, 40 * 80).astype(np.uint16).reshape(80, 40)
    picture = folder / "images" / "Abyssinian_1.jpg"
    Image.fromarray(ramp).save(picture, "PNG")
    image = load_pets(folder, size=40).images[0].float()
    assert image.mean() == pytest.approx(127.5, abs=2)
    assert image[:, 0].mean() < 5
    assert image[:, -1].mean() > 250
    Image.fromarray(ramp.astype(np.float32)).save(picture, "TIFF")
    with pytest.raises(ValueError, match=r"cannot be read: .*Abyssinian_1.jpg \(pixels are of Pillow's mode F"):
        load_pets(folder, size=40)


def test_boxes_of_images_of_another_size(folder):
    text = XML.format(w=41, h=80, objects=OBJECT.format(10, 20, 30, 60))
    (folder / "annotations" / "xmls" / "beagle_2.xml").write_text(text)
    message = r"the image has 40 x 80 pixels, and its XML file says 41 x 80: .*beagle_2.jpg"
    with pytest.raises(ValueError, match=message):
        load_pets(folder, size=32)
    with pytest.raises(ValueError, match=message):
        pack_pets(folder, folder / "packed", size=32)


def test_the_first_of_two_objects_counts(folder):
    write(folder, "beagle_2", box=(4, 8, 8, 16), more=[(10, 20, 30, 60)])
    torch.testing.assert_close(load_pets(folder, size=32).boxes[1], torch.tensor([0.1, 0.1, 0.2, 0.2]))


def test_boxes_may_stick_out_by_a_pixel(folder):
    write(folder, "beagle_2", box=(0, 0, 41, 80.5))
    assert load_pets(folder, size=32).boxes[1].tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("box", "words"),
    [
        ((10, 20, 300, 60), r"the box \(10, 20, 300, 60\) lies outside of its 40 x 80 image: .*beagle_2.xml"),
        ((-5, 20, 30, 60), "lies outside of .*beagle_2.xml"),
        ((30, 20, 10, 60), r"is empty in .*beagle_2.xml"),
        ((10, 20, 10, 60), r"is empty in .*beagle_2.xml"),
        (("x", 20, 10, 60), r"no box that can be read: .*beagle_2.xml"),
        (("nan", 20, 10, 60), r"beagle_2.xml"),
    ],
)
def test_bad_boxes(folder, box, words):
    xml = XML.format(w=40, h=80, objects=OBJECT.format(*box))
    (folder / "annotations" / "xmls" / "beagle_2.xml").write_text(xml)
    with pytest.raises(ValueError, match=words):
        load_pets(folder, size=32)


def test_bad_files(folder):
    picture, note = folder / "images" / "beagle_2.jpg", folder / "annotations" / "xmls" / "beagle_2.xml"
    whole, text = picture.read_bytes(), note.read_text()
    for content, words in (
        (whole[: len(whole) // 2], "the image cannot be read: .*beagle_2.jpg"),
        (b"no image", "the image cannot be read: .*beagle_2.jpg"),
        (b"", "the image cannot be read: .*beagle_2.jpg"),
    ):
        picture.write_bytes(content)
        with pytest.raises(ValueError, match=words):
            load_pets(folder, size=32)
        with pytest.raises(ValueError, match=words):
            pack_pets(folder, folder / "packed", size=32)
    picture.unlink()
    with pytest.raises(ValueError, match=r"the image is missing: .*beagle_2.jpg"):
        load_pets(folder, size=32)
    picture.write_bytes(whole)
    for content, words in (
        (text[:40], "no box that can be read: .*beagle_2.xml"),
        (XML.format(w=40, h=80, objects=""), r"beagle_2.xml \(object/bndbox/xmin is missing\)"),
        (text.replace("<width>40", "<width>0"), "no size, 0 x 80: .*beagle_2.xml"),
    ):
        note.write_text(content)
        with pytest.raises(ValueError, match=words):
            load_pets(folder, size=32)
    note.unlink()
    with pytest.raises(ValueError, match=r"the XML file is missing: .*beagle_2.xml"):
        load_pets(folder, size=32, names=["beagle_2"])
    assert load_pets(folder, size=32).names == ["Abyssinian_1"]


def test_bad_folders(tmp_path, monkeypatch):
    monkeypatch.delenv("FULLCP_DATA", raising=False)
    with pytest.raises(ValueError, match="FULLCP_DATA is not set"):
        load_pets()
    monkeypatch.setenv("FULLCP_DATA", str(tmp_path))
    with pytest.raises(ValueError, match=r"folder has no images in it.*oxford_pets"):
        load_pets()
    (tmp_path / "images").mkdir()
    (tmp_path / "annotations" / "xmls").mkdir(parents=True)
    with pytest.raises(ValueError, match="no XML files"):
        load_pets(tmp_path)


def test_packed_images_are_the_same(folder, tmp_path):
    write(folder, "Bengal_7", size=(32, 32), box=(4, 4, 9, 9))
    size = pack_pets(folder, tmp_path / "packed.safetensors", size=32)
    assert size == (tmp_path / "packed.safetensors").stat().st_size
    packed, data = load_packed(tmp_path / "packed.safetensors"), load_pets(folder, size=32)
    assert torch.equal(packed.images[1], data.images[1])  # of the right size: the very file
    assert (packed.images.int() - data.images.int()).abs().float().mean() < 4  # others are compressed once more
    assert torch.equal(packed.boxes, data.boxes)
    assert torch.equal(packed.classes, data.classes)
    assert packed.names == data.names
    with pytest.raises(ValueError, match="path is no file"):
        load_packed(tmp_path / "nothing")


def test_without_pillow(folder, monkeypatch):
    real = builtins.__import__

    def without(name, *arguments, **options):
        if name == "PIL":
            raise ImportError
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"fullcp\[vision\]"):
        load_pets(folder)


def test_flips_take_boxes_along():
    data = drawn_boxes(40, size=24, seed=3)
    which = torch.arange(40) % 2 == 0
    images, boxes = flip(data.images, data.boxes, which)
    assert torch.equal(images[1::2], data.images[1::2])
    assert torch.equal(boxes[1::2], data.boxes[1::2])
    torch.testing.assert_close(flip_boxes(boxes[::2]), data.boxes[::2])
    for image, box in zip(images, boxes):
        down, across = (image.amax(0) == 230).nonzero().T
        found = [across.min(), down.min(), across.max() + 1, down.max() + 1]
        assert (box * 24 - torch.stack(found)).abs().max() < 2.5


def test_overlap_by_counting_pixels():
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(0, 13, (300, 2, 4), generator=generator)
    grid = torch.arange(12)
    for first, second in edges:
        masks = []
        for left, top, right, bottom in (first.tolist(), second.tolist()):
            rows, columns = (grid >= top) & (grid < bottom), (grid >= left) & (grid < right)
            masks.append(rows[:, None] & columns)
        union = (masks[0] | masks[1]).sum()
        expected = (masks[0] & masks[1]).sum() / union if union else torch.tensor(0.0)
        torch.testing.assert_close(overlap(first[None].float(), second[None].float())[0], expected)


@pytest.mark.skipif(
    not Path(os.environ.get("FULLCP_DATA", "/nowhere"), "oxford_pets").is_dir(),
    reason="FULLCP_DATA names no folder with oxford_pets in it",
)
def test_the_real_images():
    names = ["Abyssinian_1", "Bengal_105", "beagle_189"]  # the second has two objects
    data = load_pets(names=names, size=64)
    assert data.classes.tolist() == [CAT, CAT, DOG]
    assert (data.boxes[:, :2] < data.boxes[:, 2:]).all()
    assert len(list((Path(os.environ["FULLCP_DATA"]) / "oxford_pets" / "annotations" / "xmls").glob("*.xml"))) == 3686
