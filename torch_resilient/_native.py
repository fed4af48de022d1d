"""Loads the compiled module torch_resilient._C, on first use only.

The binary fits one minor version of torch: with another one, importing it can
crash the process. So the versions are compared first, in Python.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

_BUILD = "pip install --no-build-isolation --no-deps --force-reinstall ."


def _minor(version: str) -> str:
    """`"2.13"` of `"2.13.0+cpu"`."""
    return ".".join(version.split("+")[0].split(".")[:2])


def check_versions(built_for: str, found: str) -> None:
    """Raises ImportError if a binary built for torch `built_for` does not fit torch `found`."""
    if _minor(built_for) != _minor(found):
        raise ImportError(
            f"torch_resilient._C was built for torch {built_for}, but this is torch {found}: "
            f"run `{_BUILD}` in the source of torch_resilient, or install torch "
            f"{_minor(built_for)} again"
        )


def not_built(module: str) -> str:
    """The text of the error where a compiled module of this package is missing."""
    return (
        f"torch_resilient.{module} is missing, since this copy of torch_resilient "
        f"({__file__.rpartition('/')[0]}) has not been built: run `{_BUILD}` in its source; "
        "or, if you have done so already, keep your program out of it and start Python from "
        "another directory, else this copy is found first"
    )


@functools.cache
def load() -> Any:
    """Returns torch_resilient._C.

    Raises ImportError, with what to do, if it is missing or was built for another
    minor version of torch.
    """
    import torch

    try:
        built_for = importlib.import_module("torch_resilient._build_info").TORCH_VERSION
    except ModuleNotFoundError:
        raise ImportError(not_built("_C")) from None
    check_versions(built_for, str(torch.__version__))
    try:
        return importlib.import_module("torch_resilient._C")
    except ImportError as error:
        raise ImportError(
            f"torch_resilient._C cannot be loaded ({error}): run `{_BUILD}` in the source of "
            "torch_resilient"
        ) from error
