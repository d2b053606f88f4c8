# SPDX-License-Identifier: Apache-2.0
# python/moe/_transformers_version.py: what moe.transformers needs beside the package, said in one sentence where it is missing.
from __future__ import annotations

import importlib.util
import sys
from importlib import metadata
from typing import Callable

#: As pyproject.toml states them.
LEAST = {"torch": (2, 10), "transformers": (5, 17)}


def check(find: Callable[[str], object] = importlib.util.find_spec, version_of: Callable[[str], str] = metadata.version) -> None:
    """ModuleNotFoundError unless these are installed, ImportError for another version; one that nothing states is let through."""
    for name, least in LEAST.items():
        bound = ".".join(map(str, least))
        if name not in sys.modules and find(name) is None:
            raise ModuleNotFoundError(f"moe.transformers: {name} is not installed, expected version {bound} or later", name=name)
        try:
            version = version_of(name)
        except metadata.PackageNotFoundError:
            continue
        numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
        if len(numbers) == 2 and numbers < least:
            raise ImportError(f"moe.transformers: {name} has version {version}, expected {bound} or later")
