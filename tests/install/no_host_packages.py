#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A machine with GPUs and without the host space's packages: the project configures there (MOE_HOST_DEPS=OFF, as the preset gpu does), and
no host source that it still builds includes a header of such a package.

Sources for nvcc are not asked: none of them includes the host space, and preprocessing them all takes minutes."""
import argparse
import concurrent.futures
import json
import pathlib
import shlex
import shutil
import subprocess
import sys

PACKAGES = {"MoeOneDnn": "/dnnl.h", "nlohmann_json": "/nlohmann/", "range-v3": "/range/v3/", "CLI11": "/CLI/", "fmt": "/fmt/",
            "spdlog": "/spdlog/", "rapidcheck": "/rapidcheck.h"}


def reaches_a_package(entry) -> str:
    command = [part for part in shlex.split(entry["command"]) if not part.endswith("ccache")]
    command = [part for part in command[:command.index("-o")] if part != "-c"]
    reached = subprocess.run([*command, "-M", entry["file"]], cwd=entry["directory"], capture_output=True, text=True, check=False)
    if reached.returncode != 0:
        return f"{entry['file']}: {reached.stderr.strip()[:500]}"
    return "".join(f"{entry['file']} includes {header} of {package} and is still built\n"
                   for package, header in PACKAGES.items() if header in reached.stdout)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--source", required=True, type=pathlib.Path)
    parser.add_argument("--work", required=True, type=pathlib.Path)
    parser.add_argument("--toolkit", required=True, type=pathlib.Path)
    parser.add_argument("--cxx", required=True)
    options = parser.parse_args()
    shutil.rmtree(options.work, ignore_errors=True)
    configured = subprocess.run(
        ["cmake", "-S", options.source, "-B", options.work, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=RelWithDebInfo", "-DMOE_CUDA=ON",
         "-DMOE_RUN_CUDA=OFF", "-DMOE_HOST_DEPS=OFF", f"-DMOE_CUDA_ROOT={options.toolkit}", f"-DCMAKE_CXX_COMPILER={options.cxx}",
         "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON", *(f"-DCMAKE_DISABLE_FIND_PACKAGE_{package}=ON" for package in PACKAGES)],
        capture_output=True, text=True, check=False)
    if configured.returncode != 0:
        print(f"FAILED: cmake\n{configured.stdout[-3000:]}{configured.stderr[-3000:]}")
        return 1
    left_out = [line for line in configured.stdout.splitlines() if "left out" in line]
    entries = [entry for entry in json.loads((options.work / "compile_commands.json").read_text()) if entry["file"].endswith(".cpp")]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        problems = [problem for problem in pool.map(reaches_a_package, entries) if problem]
    for problem in problems:
        print(f"FAILED: {problem}")
    print("\n".join(left_out))
    print(f"{len(entries)} host sources without the host packages, {len(left_out)} programs left out, {len(problems)} problems")
    return 1 if problems or not entries or not left_out else 0


if __name__ == "__main__":
    sys.exit(main())
