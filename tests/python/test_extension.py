# SPDX-License-Identifier: Apache-2.0
# tests/python/test_extension.py: the package asks its extension for names that exist; what it cannot do here is one exception.
import ast
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

import moe
from moe import _transformers_version
from moe._ffi import library
from moe._tvm_version import BELOW, LEAST, check_version

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


def test_versions_of_tvm_ffi():
    for version in ("0.1.11", "0.1.15", "0.1.15.post2", "0.1.99.dev1", ""):
        check_version(version)
    for version in ("0.1.10", "0.1.9", "0.2.0", "1.0.0", "0.0.12"):
        with pytest.raises(ImportError, match=f"apache-tvm-ffi has version {re.escape(version)}, expected at least 0.1.11 and below 0.2"):
            check_version(version)
    stated = (pathlib.Path(__file__).resolve().parents[2] / "python" / "pyproject.toml").read_text(encoding="utf-8")
    least, below = (".".join(map(str, bound)) for bound in (LEAST, BELOW))
    assert stated.count(f"apache-tvm-ffi>={least},<{below}") == 2


def test_the_package_refuses_another_version_of_tvm_ffi(tmp_path):
    (tmp_path / "tvm_ffi").mkdir()
    (tmp_path / "tvm_ffi" / "__init__.py").write_text('__version__ = "0.1.3"\n')
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", "import moe"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.strip().endswith("expected at least 0.1.11 and below 0.2; install one of these"), done.stderr


@pytest.fixture
def with_another(tmp_path):
    """Runs a program with a function of C in place of a library's own, and returns its last line and exit code."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")

    def run(function, program):
        (tmp_path / "another.c").write_text(function + "\n")
        library = tmp_path / "another.so"
        subprocess.run([compiler, "-shared", "-fPIC", "-o", library, tmp_path / "another.c"], check=True)
        preload = " ".join(filter(None, [os.environ.get("LD_PRELOAD"), str(library)]))
        done = subprocess.run([sys.executable, "-c", program], env={**os.environ, "LD_PRELOAD": preload}, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, check=False)  # fmt: skip
        return done.stdout.strip().splitlines()[-1], done.returncode

    return run


def test_the_package_refuses_a_libmoe_of_another_interface(with_another):
    last, code = with_another("int moe_abi_version(void) { return 7; }", "import moe")
    assert code == 1 and last.startswith("ImportError: moe: libmoe has version 7 of the C interface, another than the extension"), last


def test_a_group_refuses_another_version_of_nccl(with_another):
    if not moe.has("nccl"):
        pytest.skip("libmoe was built without NCCL")
    another, group = "int ncclGetVersion(int* version) { *version = 20105; return 0; }", "moe.Group.nccl(bytes(128), 0, 1)"
    last, code = with_another(another, f"import moe; {group}")
    assert code == 1 and "UnsupportedError: E_UNSUPPORTED: nccl: the program was built against version code " in last, last
    assert "and runs on 20105" in last
    # The id is used after that, and refused before NCCL is asked.
    last, code = with_another(another, f"import moe\ntry: {group}\nexcept moe.UnsupportedError: {group}")
    assert code == 1 and "StateError: E_STATE: id: this process has used it for a group before" in last, last


def test_what_transformers_models_need_is_named():
    versions = {"torch": "2.10.0+cpu", "transformers": "5.17.0.dev0"}
    _transformers_version.check(versions.get, versions.__getitem__)
    for name, version in (("torch", "2.9.1"), ("transformers", "4.57.0"), ("transformers", "5.16.2")):
        other = {**versions, name: version}
        bound = ".".join(map(str, _transformers_version.LEAST[name]))
        with pytest.raises(ImportError, match=f"^moe.transformers: {name} has version {re.escape(version)}, expected {bound} or later$"):
            _transformers_version.check(other.get, other.__getitem__)
    with pytest.raises(ImportError, match="^moe.transformers: transformers is not installed, expected version 5.17 or later$"):
        _transformers_version.check({"torch": "2.15.0"}.get, {"torch": "2.15.0"}.__getitem__)
    settings = (pathlib.Path(__file__).parents[2] / "python" / "pyproject.toml").read_text()
    for name, least in _transformers_version.LEAST.items():
        assert f'"{name}>={".".join(map(str, least))}"' in settings
