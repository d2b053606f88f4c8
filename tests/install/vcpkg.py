#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The vcpkg port without vcpkg: its portfile.cmake runs with the stand-ins of vcpkg.cmake, and the project of packaging/conan/test_package
builds and runs on the package. With each feature of vcpkg.json the checkout is configured, as its option says, and not built."""
import argparse
import json
import pathlib
import shutil
import subprocess
import sys

OPTIONS = {"c": "MOE_BUILD_C"}  # what a feature switches on


def run(*command: object) -> str:
    done = subprocess.run([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"FAILED ({done.returncode}): {' '.join(map(str, command))}\n{done.stdout[-4000:]}")
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser()
    for option in ("source", "work", "toolkit"):
        parser.add_argument(f"--{option}", required=True, type=pathlib.Path)
    for option in ("cmake", "cxx"):
        parser.add_argument(f"--{option}", required=True)
    options = parser.parse_args()
    port = options.source / "packaging/vcpkg/moe"
    shutil.rmtree(options.work, ignore_errors=True)
    features = json.loads((port / "vcpkg.json").read_text()).get("features", {})
    problems = [] if set(features) == set(OPTIONS) else [f"vcpkg.json has the features {sorted(features)}, expected {sorted(OPTIONS)}"]

    for chosen in ((), *((feature,) for feature in OPTIONS)):
        work = options.work / ("_".join(chosen) or "alone")
        run(options.cmake, f"-DPORT={port}", f"-DWORK={work}", f"-DCXX={options.cxx}", f"-DTOOLKIT={options.toolkit}",
            f"-DBUILD={'OFF' if chosen else 'ON'}", f"-DFEATURES={';'.join(('core', *chosen))}",
            "-P", pathlib.Path(__file__).with_suffix(".cmake"))  # fmt: skip
        cache = dict(line.split(":", 1) for line in (work / "build/CMakeCache.txt").read_text().splitlines() if line.startswith("MOE_"))
        for feature, option in OPTIONS.items():
            wanted = f"BOOL={'ON' if feature in chosen else 'OFF'}"
            if cache.get(option) != wanted:
                problems.append(f"with the features {list(chosen)}: {option} is {cache.get(option)}, expected {wanted}")

    package, program = options.work / "alone/package", options.work / "program"
    problems += [f"the package lacks {name}" for name in ("include/moe/moe.hpp", "share/moe/moeConfig.cmake", "share/moe/LICENSE")
                 if not (package / name).is_file()]  # fmt: skip
    run(options.cmake, "-S", options.source / "packaging/conan/test_package", "-B", program, "-G", "Ninja",
        f"-DCMAKE_PREFIX_PATH={package}", f"-DCMAKE_CXX_COMPILER={options.cxx}", f"-DMOE_CUDA_ROOT={options.toolkit}")  # fmt: skip
    run(options.cmake, "--build", program)
    if "experts 3 2, 0 1, 1 3" not in (said := run(program / "program")):
        problems.append(f"the program on the package said {said!r}")
    for problem in problems:
        print(f"FAILED: {problem}")
    print(f"the port alone and with {', '.join(OPTIONS)}: {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
