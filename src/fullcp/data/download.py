"""Where the files of data sets are: the user's folder, the cache, or a public home that fills the cache."""

from __future__ import annotations

import gzip
import io
import os
import tempfile
import urllib.error
import urllib.request
import zipfile
import zlib
from pathlib import Path

_TIMEOUT = 60  # seconds without an answer


class DataUnavailableError(OSError):
    """A data set is neither on this machine nor can it be downloaded; the message says where to put it."""


class DamagedFileError(ValueError):
    """A file cannot be unpacked, or is no text; the message names it."""


def find_file(name: str, urls: tuple[str, ...], by_hand: str = "") -> Path:
    """The file of this name: in FULLCP_DATA (or its folder uci/), in the cache, or downloaded into the cache.

    Compressed (.gz) and plain files serve alike.

    Parameters
    ----------
    name : of the plain file.
    urls : where it may be downloaded, tried in order; a zip archive holds it under its name, in archives within too.
    by_hand : where a person finds it.
    """
    for folder in folders():
        for candidate in (folder / name, folder / f"{name}.gz"):
            if candidate.is_file():
                return candidate
    place = cache_folder() / f"{name}.gz"
    failures = []
    for url in urls:
        try:
            content = _member(_fetch(url), name)
        except (OSError, EOFError, zlib.error, zipfile.BadZipFile, KeyError) as error:
            failures.append(f"{url}: {error}")
            continue
        _write(place, content)
        return place
    tried = f" Downloads failed: {'; '.join(failures)}." if failures else " It has no public download."
    hint = f" Get it from {by_hand}" if by_hand else " Get it elsewhere"
    searched = ", ".join(str(folder) for folder in folders())
    raise DataUnavailableError(
        f"{name} is not in {searched}.{tried}{hint}, and put it (or {name}.gz) there, or into a folder that "
        "FULLCP_DATA names"
    )


def folders() -> list[Path]:
    """Where files are looked for, in order."""
    given = os.environ.get("FULLCP_DATA")
    mine = [Path(given, "uci"), Path(given)] if given else []
    return [*mine, cache_folder()]


def cache_folder() -> Path:
    """FULLCP_CACHE, or a folder in the user's home."""
    return Path(os.environ.get("FULLCP_CACHE") or Path.home() / ".cache" / "fullcp")


def read_text(path: Path) -> str:
    """The text of a plain or compressed file."""
    content = path.read_bytes()
    try:
        return (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8-sig")
    except (gzip.BadGzipFile, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DamagedFileError(f"{path} is damaged ({error}): delete it, and get it anew") from error


def _fetch(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT) as answer:
            content: bytes = answer.read()
            return content
    except urllib.error.HTTPError as error:
        raise OSError(f"the server answers {error.code} {error.reason}") from error
    except urllib.error.URLError as error:
        raise OSError(str(error.reason)) from error


def _member(content: bytes, name: str) -> bytes:
    """The plain file in what was downloaded."""
    if content[:2] == b"\x1f\x8b":
        return gzip.decompress(content)
    if content[:4] != b"PK\x03\x04":
        return content
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for inner in archive.namelist():
            if inner.rsplit("/", 1)[-1] == name:
                return archive.read(inner)
        for inner in archive.namelist():
            if inner.endswith(".zip"):
                try:
                    return _member(archive.read(inner), name)
                except KeyError:
                    continue
    raise KeyError(f"the archive holds no {name}")


def _write(path: Path, content: bytes) -> None:
    """Write a file compressed, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(gzip.compress(content, mtime=0))
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
