"""The Oxford-IIIT Pet data set: 3,686 photographs of cats and dogs with a box around the face (Parkhi et al., 2012).

The official layout is read: `images/<Breed>_<number>.jpg` and `annotations/xmls/<Breed>_<number>.xml`. Breeds that
begin with a capital letter are cats, as `annotations/list.txt` says. Images without an XML file have no box and are
left out. Both archives are at https://www.robots.ox.ac.uk/~vgg/data/pets/. Reading images takes Pillow:
pip install 'fullcp[vision]'.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
from torch import Tensor

from fullcp.data.boxes import CAT, DOG, BoxImages
from fullcp.files import read_file, write_file
from fullcp.inputs import check_positive_int
from fullcp.progress import track

_EDGES = ("xmin", "ymin", "xmax", "ymax")
_ROOM = 1.0  # pixels that a box may stick out: annotations count pixels from 1


def load_pets(
    folder: str | os.PathLike[str] | None = None, *, size: int = 224, names: Iterable[str] | None = None
) -> BoxImages:
    """Read all images with a box, resized to `size` x `size`, in the order of their names.

    Of several objects in an image, the first counts. Grey images (of 8 or 16 bits), palettes and images with
    transparency become RGB.

    Parameters
    ----------
    folder : the folder that holds `images` and `annotations`; None is `oxford_pets` in the folder FULLCP_DATA names.
    size : side of the images in pixels.
    names : which images ("Abyssinian_1") in place of all; each must have its XML file.

    Raises
    ------
    ValueError
        With the name of the file: where an image or an XML file is missing or cannot be read, where a box lies outside
        its image or is empty, where the image has another size than its XML file says.
    """
    root = _folder(folder)
    check_positive_int("size", size, least=8)
    if names is None:
        names = sorted(path.stem for path in (root / "annotations" / "xmls").glob("*.xml"))
    names = list(names)
    if not names:
        raise ValueError(f"folder holds no XML files in annotations/xmls: {root}")
    boxes, sizes = _annotations(root, names)
    images = _decode_all([root / "images" / f"{name}.jpg" for name in names], size, sizes=sizes)
    return BoxImages(images, boxes, torch.tensor([species(name) for name in names]), names)


def species(name: str) -> int:
    """`CAT` or `DOG`, by the breed in a file's name.

    Examples
    --------
    >>> species("Maine_Coon_12") == CAT, species("great_pyrenees_7") == DOG
    (True, True)
    """
    return CAT if name[:1].isupper() else DOG


def read_box(path: Path) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of the first object of an XML file, as shares of the width and height it names."""
    return _annotation(path)[0]


def _annotations(root: Path, names: Sequence[str]) -> tuple[Tensor, list[tuple[int, int]]]:
    """Boxes (n, 4), and the sizes of the images they were drawn in."""
    found = [_annotation(root / "annotations" / "xmls" / f"{name}.xml") for name in names]
    return torch.tensor([box for box, _ in found]), [size for _, size in found]


def _annotation(path: Path) -> tuple[tuple[float, float, float, float], tuple[int, int]]:
    """The box of an XML file, and the width and height of its image."""
    if not path.is_file():
        raise ValueError(f"the XML file is missing: {path}")
    try:
        root = ElementTree.parse(path).getroot()
        width, height = (float(_text(root, f"size/{side}")) for side in ("width", "height"))
        edges = [float(_text(root, f"object/bndbox/{edge}")) for edge in _EDGES]
    except (ElementTree.ParseError, ValueError) as error:
        raise ValueError(f"the XML file has no box that can be read: {path} ({error})") from error
    left, top, right, bottom = edges
    if not (width > 0 and height > 0):
        raise ValueError(f"the XML file gives its image no size, {width:g} x {height:g}: {path}")
    inside = left >= -_ROOM and top >= -_ROOM and right <= width + _ROOM and bottom <= height + _ROOM
    if not (inside and left < right and top < bottom):
        wrong = "lies outside of" if left < right and top < bottom else "is empty in"
        raise ValueError(
            f"the box ({', '.join(f'{e:g}' for e in edges)}) {wrong} its {width:g} x {height:g} image: {path}"
        )
    shares = (left / width, top / height, right / width, bottom / height)
    box = tuple(min(max(share, 0.0), 1.0) for share in shares)
    return box, (round(width), round(height))  # type: ignore[return-value]


def pack_pets(source: str | os.PathLike[str] | None, path: str | os.PathLike[str], *, size: int = 224) -> int:
    """Write all images as JPEG into one file that `load_packed` reads, and return its size in bytes.

    Files that are JPEG of this size already are taken as they are, the others are resized and written with quality 92.
    """
    root = _folder(source)
    names = sorted(file.stem for file in (root / "annotations" / "xmls").glob("*.xml"))
    boxes, sizes = _annotations(root, names)
    both = zip(names, sizes, strict=True)
    parts = [
        _as_jpeg(root / "images" / f"{name}.jpg", size, drawn_in)
        for name, drawn_in in track(both, "packing images", len(names))
    ]
    ends = torch.tensor([len(part) for part in parts]).cumsum(0)
    data = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)
    write_file(Path(path), {"jpeg": data, "ends": ends, "boxes": boxes}, {"kind": "pets", "names": names, "size": size})
    return Path(path).stat().st_size


def load_packed(path: str | os.PathLike[str]) -> BoxImages:
    """Read what `pack_pets` wrote."""
    if not Path(path).is_file():
        raise ValueError(f"path is no file: {path}")
    header, state = read_file(Path(path), torch.device("cpu"))
    if header.get("kind") != "pets":
        raise ValueError(f"path holds no packed images: {path}")
    data, ends = state["jpeg"].numpy().tobytes(), [0, *state["ends"].tolist()]
    parts: list[Any] = [data[start:stop] for start, stop in pairwise(ends)]
    names = header["names"]
    classes = torch.tensor([species(name) for name in names])
    return BoxImages(_decode_all(parts, header["size"], names), state["boxes"], classes, names)


def _folder(folder: str | os.PathLike[str] | None) -> Path:
    if folder is None:
        if "FULLCP_DATA" not in os.environ:
            raise ValueError(
                "folder is None and FULLCP_DATA is not set: name the folder that holds images/ and annotations/xmls/ "
                "of the Oxford-IIIT Pet data set (https://www.robots.ox.ac.uk/~vgg/data/pets/)"
            )
        folder = Path(os.environ["FULLCP_DATA"]) / "oxford_pets"
    root = Path(folder)
    for part in ("images", "annotations/xmls"):
        if not (root / part).is_dir():
            raise ValueError(f"folder has no {part} in it, which the Oxford-IIIT Pet data set has: {root}")
    return root


def _text(root: ElementTree.Element, where: str) -> str:
    found = root.findtext(where)
    if found is None:
        raise ValueError(f"{where} is missing")
    return found


def _decode_all(
    sources: Sequence[Path | bytes],
    size: int,
    names: Sequence[str] | None = None,
    sizes: Sequence[tuple[int, int]] | None = None,
) -> Tensor:
    """Images (n, 3, size, size), uint8; a few threads, for decoders let go of the interpreter."""
    _pillow()
    images = torch.empty(len(sources), 3, size, size, dtype=torch.uint8)

    def decode(i: int) -> None:
        source = sources[i]
        name = str(source) if isinstance(source, Path) else f"image {names and names[i]}"
        images[i] = _pixels(source, size, name, sizes[i] if sizes else None)

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for _ in track(pool.map(decode, range(len(sources))), "reading images", len(sources)):
            pass
    return images


def _pixels(source: Path | bytes, size: int, name: str, drawn_in: tuple[int, int] | None) -> Tensor:
    import numpy as np

    return torch.from_numpy(np.array(_open(source, size, name, drawn_in))).permute(2, 0, 1)


def _open(source: Path | bytes, size: int, name: str, drawn_in: tuple[int, int] | None) -> Any:
    """The image in RGB at the size wanted; its own must be the one its box was drawn in, where that is known."""
    Image = _pillow()
    if isinstance(source, Path) and not source.is_file():
        raise ValueError(f"the image is missing: {name}")
    try:
        with Image.open(BytesIO(source) if isinstance(source, bytes) else source) as image:
            image.load()
            rgb = _in_rgb(image)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # Pillow raises all of these
        raise ValueError(f"the image cannot be read: {name} ({error})") from error
    if drawn_in is not None and rgb.size != drawn_in:
        found, wanted = (f"{width} x {height}" for width, height in (rgb.size, drawn_in))
        raise ValueError(f"the image has {found} pixels, and its XML file says {wanted}: {name}")
    return rgb if rgb.size == (size, size) else rgb.resize((size, size), Image.Resampling.BILINEAR)


def _in_rgb(image: Any) -> Any:
    """The image in RGB; Pillow itself would cut all numbers over 255 off."""
    if image.mode.startswith("I;16"):
        import numpy as np

        return _pillow().fromarray((np.asarray(image) // 257).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise ValueError(f"pixels are of Pillow's mode {image.mode}, whose white is unknown: save it with 8 bits")
    return image.convert("RGB")


def _as_jpeg(path: Path, size: int, drawn_in: tuple[int, int]) -> bytes:
    """The file's own bytes where they will do, else a new JPEG."""
    image = _open(path, size, str(path), drawn_in)
    with _pillow().open(path) as original:
        if (original.format, original.mode, original.size) == ("JPEG", "RGB", (size, size)):
            return path.read_bytes()
    buffer = BytesIO()
    image.save(buffer, "JPEG", quality=92)
    return buffer.getvalue()


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("reading images needs Pillow; install it with: pip install 'fullcp[vision]'") from error
    return Image
