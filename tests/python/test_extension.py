# SPDX-License-Identifier: Apache-2.0
# tests/python/test_extension.py: the package asks its extension for names that exist; what it cannot do here is one exception.
import ast
import pathlib

import pytest

import moe
from moe._ffi import library

PACKAGE = pathlib.Path(moe.__file__).parent


def names_taken() -> dict[str, str]:
    """Attributes of `library` of _ffi.py, under any name that a module of the package imports it by, and the file of each."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        aliases = {"library"} if path.name == "_ffi.py" else set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").endswith("_ffi"):
                aliases |= {alias.asname or alias.name for alias in node.names if alias.name == "library"}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
                found[node.attr] = path.name
    return found


def test_every_name_that_the_package_takes_is_exported():
    taken = names_taken()
    assert {"runner_create", "forward_routed", "stream_wait", "route", "abi_version"} <= set(taken)
    missing = []
    for name, path in taken.items():
        try:
            getattr(library, name)
        except AttributeError:
            missing.append(f"{path}: {name}")
    assert not missing


def test_a_name_that_is_not_exported_is_an_error():
    with pytest.raises(AttributeError):
        library.no_such_function


def test_waiting_for_a_stream():
    with pytest.raises(moe.ArgumentError, match="timeout_ms.*-1"):
        library.stream_wait(0, 0, -1)
    if not moe.has("cuda"):
        with pytest.raises(moe.UnsupportedError, match="without CUDA"):
            library.stream_wait(0, 0, 0)
