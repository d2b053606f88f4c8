# SPDX-License-Identifier: Apache-2.0
# tests/python/test_wheel.py: the package as pip builds and installs it, into an empty folder, without the network, over a libmoe in an
# empty prefix; what runs is the project in tests/install/python_consumer.
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import venv
import zipfile

import pytest

if not os.environ.get("MOE_LIBRARY"):
    pytest.skip("MOE_LIBRARY does not name the libmoe to pack", allow_module_level=True)
for tool in ("cmake", "nm"):
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed", allow_module_level=True)

#: What `cmake --install` takes libmoe from. Not where the host packages are missing, whose GPU library needs its run path.
BUILD = os.environ.get("MOE_INSTALL_FROM")
CONSUMER = pathlib.Path(__file__).resolve().parents[1] / "install" / "python_consumer" / "program.py"
PACKAGE = pathlib.Path(__file__).resolve().parents[2] / "python"
#: What the extension may take from apache-tvm-ffi: functions of 0.1.11 and of every version since.
TVM_FFI = {"TVMFFIBacktrace", "TVMFFIEnvGetStream", "TVMFFIErrorMoveFromRaised", "TVMFFIErrorSetRaised", "TVMFFIGetTypeAttrColumn",
           "TVMFFIGetTypeInfo"}  # fmt: skip


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if not BUILD:
        yield os.environ["MOE_LIBRARY"]
        return
    prefix = tmp_path_factory.mktemp("prefix")
    subprocess.run(["cmake", "--install", BUILD, "--prefix", prefix], check=True, capture_output=True)
    (installed,) = prefix.glob("lib*/**/libmoe.so")
    yield installed
    shutil.rmtree(prefix)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory, library):
    folder = tmp_path_factory.mktemp("wheel")
    options = [f"--config-settings=cmake.define.MOE_LIBRARY={library}", f"--config-settings=build-dir={folder}/build"]
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", folder,
               *options, PACKAGE]  # fmt: skip
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("*.whl")
    return built


def test_one_wheel_for_every_version_of_python(wheel):
    assert re.fullmatch(r"moe-[0-9.]+-py3-none-linux_\w+\.whl", wheel.name), wheel.name
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"moe/__init__.py", "moe/py.typed", "moe/transformers/__init__.py", "moe/lib/libmoe_python.so", "moe/lib/libmoe.so.1"} <= names


def test_the_extension_knows_neither_python_nor_torch(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    symbols = subprocess.run(["nm", "-D", "--undefined-only", tmp_path / "moe/lib/libmoe_python.so"], capture_output=True, text=True,
                             check=True)
    undefined = {line.split()[-1].partition("@")[0] for line in symbols.stdout.splitlines()}
    assert {s for s in undefined if s.startswith("TVMFFI")} <= TVM_FFI
    assert not {s for s in undefined if s.startswith(("Py", "_Py")) or "torch" in s or "c10" in s}


def test_an_installed_package_runs(wheel, tmp_path):
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", tmp_path / "site", wheel]
    subprocess.run(list(map(str, install)), check=True, capture_output=True)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    subprocess.run([sys.executable, CONSUMER, tmp_path / "site"], env=environment, check=True, cwd=tmp_path)


def test_a_virtual_environment_needs_no_variable(wheel, tmp_path):
    """What is installed runs without MOE_LIBRARY and PYTHONPATH, on the libmoe in the wheel. The venv takes numpy and apache-tvm-ffi
    from where this Python has them, so that the network is not asked."""
    pytest.importorskip("ensurepip")  # Debian has it in python3-venv
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel]
    environment = {k: v for k, v in os.environ.items() if k not in ("MOE_LIBRARY", "PYTHONPATH")}
    subprocess.run(list(map(str, install)), env=environment, check=True, capture_output=True)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    folders = {str(pathlib.Path(importlib.util.find_spec(module).origin).parents[1]) for module in ("numpy", "tvm_ffi")}
    (site / "required.pth").write_text("\n".join(sorted(folders)) + "\n")
    subprocess.run([python, CONSUMER, site], env=environment, check=True, cwd=tmp_path)
    loaded = subprocess.run([python, "-c", "import moe; print(open('/proc/self/maps').read())"], env=environment, check=True,
                            capture_output=True, text=True, cwd=tmp_path).stdout  # fmt: skip
    libraries = {line.split()[-1] for line in loaded.splitlines() if "/libmoe.so" in line}
    assert libraries == {str(site / "moe" / "lib" / "libmoe.so.1")}


def test_pip_without_a_library_would_build_it(tmp_path):
    """`pip install ./python` compiles libmoe from the checkout, for minutes. Here it is configured, and asked for its commands."""
    if shutil.which("ninja") is None:
        pytest.skip("ninja is not installed")
    environment = {k: v for k, v in os.environ.items() if k not in ("MOE_LIBRARY", "PYTHONPATH")}

    def run(*command):
        done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("cmake", "-G", "Ninja", "-S", PACKAGE, "-B", tmp_path, f"-DPython_EXECUTABLE={sys.executable}")
    steps = run("ninja", "-C", tmp_path, "-t", "commands", "moe_python")
    assert "src/extension.cpp" in steps and "libmoe_python.so" in steps, steps
    assert re.search(r"-o \S*libmoe\.so\.", steps), steps
    script = (tmp_path / "cmake_install.cmake").read_text()
    assert 'RENAME "libmoe.so.1" FILES' in script and "libmoe_python.so" in script, script
