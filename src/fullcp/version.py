"""The version, from the installed package."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("fullcp")
except PackageNotFoundError:  # a source tree on PYTHONPATH
    __version__ = "0.1.0+source"
