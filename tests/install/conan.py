#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`conan create` packages this checkout and builds and runs the project of packaging/conan/test_package on the package, without the network
and in a Conan home of its own: the headers alone, and with libmoe for the host (with_c), which is not optimised here. Exit code 77 where
Conan is missing: scripts/setup installs it into .deps/conan."""
import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys


def main() -> int:
    parser = argparse.ArgumentParser()
    for option in ("source", "work", "toolkit"):
        parser.add_argument(f"--{option}", required=True, type=pathlib.Path)
    parser.add_argument("--cxx", required=True)
    options = parser.parse_args()
    conan = shutil.which("conan", path=os.pathsep.join([str(options.source / ".deps/conan/bin"), os.environ.get("PATH", "")]))
    if conan is None:
        print("skipped: Conan is not installed")
        return 77
    version = re.search(r"project\(moe VERSION (\S+)", (options.source / "CMakeLists.txt").read_text()).group(1)
    shutil.rmtree(options.work, ignore_errors=True)
    environment = {**os.environ, "CONAN_HOME": str(options.work / "home"), "CXX": options.cxx, "CUDA_HOME": str(options.toolkit)}

    def run(*command: object) -> str:
        done = subprocess.run([conan, *map(str, command)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              check=False)  # fmt: skip
        if done.returncode != 0:
            sys.exit(f"FAILED ({done.returncode}): conan {' '.join(map(str, command))}\n{done.stdout[-4000:]}")
        return done.stdout

    run("profile", "detect")
    folder = f"tools.cmake.cmake_layout:test_folder={options.work}/test"
    routed, experts = "experts 3 2, 0 1, 1 3", "token 3: 2.57"  # of test_package/program.cpp and of examples/c/experts.c
    recipe = ("create", "--no-remote", options.source / "packaging/conan", "-c", folder)
    said = run(*recipe)
    problems = [f"conan create does not say {part!r}" for part in (f"moe/{version}", routed) if part not in said]
    if experts in said:
        problems.append("a package without with_c has libmoe")
    quick = ("-s", "build_type=Debug", "-c", 'tools.build:cxxflags=["-g0"]',
             "-c", 'tools.cmake.cmaketoolchain:extra_variables={"MOE_GROUP_FILES": "8"}')  # fmt: skip
    said = run(*recipe, *quick, "-o", "moe/*:with_c=True", "-o", "moe/*:cuda=OFF")
    problems += [f"conan create with with_c does not say {part!r}" for part in (routed, experts) if part not in said]
    if (options.source / "packaging/conan/test_package/build").exists():
        problems.append("packaging/conan/test_package/build: the test wrote into the checkout")
    for problem in problems:
        print(f"FAILED: {problem}\n{said[-4000:]}")
    print(f"moe/{version}: packaged without and with libmoe, and a project built on it; {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
