#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the commands of README.md and docs that build and install, as they are printed, in a copy of the checkout in which nothing was
built, and uses what they make. In them /opt/moe is a folder of this test. `scripts/test --all` runs it: libmoe is built twice, with CUDA
where an nvcc is found. --quick, for a change of the install rules, builds without CUDA and optimisation. Where PyPI cannot be reached,
pip's command is left out."""
import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys

from page_commands import commands

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


class Failure(Exception):
    pass


class Checkout:
    def __init__(self, work: pathlib.Path, quick: bool) -> None:
        self.folder, self.prefix, self.venv = work / "checkout", work / "opt", work / "venv"
        self.environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "MOE_LIBRARY")}
        listed = subprocess.run(["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"], check=True,
                                capture_output=True, text=True)  # fmt: skip
        for name in filter(lambda name: (ROOT / name).is_file(), listed.stdout.split("\0")[:-1]):
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, self.folder / name)
        if (ROOT / ".deps").exists():
            (self.folder / ".deps").symlink_to(ROOT / ".deps")
        if quick:
            self.make_quick()

    def make_quick(self) -> None:
        plain = {"MOE_CUDA": "OFF", "MOE_GROUP_FILES": "8", "CMAKE_CXX_FLAGS_RELEASE": "-O0", "CMAKE_CXX_FLAGS_RELWITHDEBINFO": "-O0"}
        presets = json.loads((self.folder / "CMakePresets.json").read_text())
        for preset in presets["configurePresets"]:
            preset["cacheVariables"] = {**preset.get("cacheVariables", {}), **plain}
        (self.folder / "CMakePresets.json").write_text(json.dumps(presets))
        self.environment["CMAKE_ARGS"] = " ".join(f"-D{name}={value}" for name, value in plain.items())

    def run(self, command: str, folder: str = ".") -> str:
        print(f"$ {command}", flush=True)
        done = subprocess.run(["bash", "-ec", command], cwd=self.folder / folder, env=self.environment, capture_output=True, text=True,
                              check=False)  # fmt: skip
        if done.returncode != 0:
            raise Failure(f"exit code {done.returncode}: {done.stdout[-3000:]}{done.stderr[-3000:]}")
        return done.stdout

    def printed(self, page: str, start: str, folder: str = ".") -> str:
        """Runs the command of a page that starts so."""
        found = [command for command in commands(self.folder / page) if command.startswith(start)]
        if len(found) != 1:
            raise Failure(f"{page}: expected one command that starts with {start!r}, found {found}")
        return self.run(found[0].replace("/opt/moe", str(self.prefix)), folder)


def libmoe_alone(checkout: Checkout) -> None:
    """A tree in which nothing but libmoe was built is installed, and a program in C finds it."""
    checkout.printed("docs/c.md", "cmake --preset release")
    if (checkout.prefix / "bin/moe").exists():
        raise Failure("the tool was built, too")
    checkout.printed("docs/c.md", "cc experts.c", "examples/c")
    if "token 3: 2.57" not in (said := checkout.run("./a.out", "examples/c")):
        raise Failure(f"the program says {said!r}")


def everything(checkout: Checkout) -> None:
    checkout.printed("docs/start.md", "cmake --preset release")
    checkout.run(f"{checkout.prefix}/bin/moe list compositions")


def package(checkout: Checkout) -> None:
    if "`cpack -G DEB` in a build folder" not in (checkout.folder / "docs/start.md").read_text():
        raise Failure("docs/start.md does not name cpack's command")
    checkout.run("cpack -G DEB", "build/release")
    if len(packages := list((checkout.folder / "build/release").glob("libmoe-dev*.deb"))) != 1:
        raise Failure(f"expected one package, found {packages}")


def python(checkout: Checkout) -> None:
    checkout.run(f"{sys.executable} -m venv {checkout.venv}")
    checkout.environment.update(VIRTUAL_ENV=str(checkout.venv), PATH=f"{checkout.venv}/bin:{os.environ['PATH']}")
    try:
        checkout.run(f"pip download --quiet --no-deps --dest {checkout.venv}/reached 'scikit-build-core>=0.11'")
    except Failure as failure:
        print(f"left out: PyPI cannot be reached: {failure}")
        return
    checkout.printed("docs/python.md", "pip install ./python")
    checkout.run(f"python {ROOT}/tests/install/python_consumer/program.py {checkout.venv}", "examples")


def script(checkout: Checkout) -> None:
    checkout.printed("README.md", "scripts/run")


PARTS = {part.__name__: part for part in (libmoe_alone, everything, package, python, script)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", required=True, type=pathlib.Path, help="a folder that is emptied")
    parser.add_argument("--quick", action="store_true", help="without CUDA and optimisation")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {' '.join(PARTS)}; all if none is given")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.parts) - set(PARTS)):
        parser.error(f"unknown: {' '.join(unknown)}, known: {' '.join(PARTS)}")
    work = arguments.work.resolve()
    shutil.rmtree(work, ignore_errors=True)
    checkout, failed = Checkout(work, arguments.quick), []
    for name in arguments.parts or PARTS:
        try:
            PARTS[name](checkout)
        except Failure as failure:
            failed.append(name)
            print(f"FAILED: {name}: {failure}", flush=True)
    if not failed:
        shutil.rmtree(work)  # some gigabytes
    print(f"{len(failed)} parts failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
