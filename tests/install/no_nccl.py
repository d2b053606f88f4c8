#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A toolkit without NCCL: the project configures with it, no source that it still builds includes an NCCL header, and a program links.

The toolkit is a folder of links to the real one that leaves NCCL's headers and libraries out. With --target all everything is built that
such a toolkit can build, with MOE_JOBS compilations at a time."""
import argparse
import concurrent.futures
import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys


def run(*command, **options):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, **options)
    if done.returncode != 0:
        print(f"FAILED ({done.returncode}): {shlex.join(map(str, command))}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        sys.exit(1)
    return done.stdout


def link_toolkit(real: pathlib.Path, fake: pathlib.Path):
    """Links every file below `real` but NCCL's; folders are real ones, so that nvcc finds its parts beside itself."""
    for path in real.rglob("*"):
        relative = path.relative_to(real)
        if any("nccl" in part.lower() for part in relative.parts) or path.is_dir():
            continue
        target = fake / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(path.resolve())


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--source", required=True, type=pathlib.Path)
    parser.add_argument("--work", required=True, type=pathlib.Path)
    parser.add_argument("--toolkit", required=True, type=pathlib.Path)
    parser.add_argument("--cxx", required=True)
    parser.add_argument("--host-deps", required=True)
    parser.add_argument("--target", default="gpu_routing_tables_test")
    options = parser.parse_args()
    whole = options.target == "all"
    toolkit, build = options.work / "toolkit", options.work / "build"
    shutil.rmtree(options.work, ignore_errors=True)
    for folder in ("bin", "include", "lib64", "lib", "nvvm", "targets", "cccl"):
        if (options.toolkit / folder).exists():
            link_toolkit(options.toolkit / folder, toolkit / folder)
    # MOE_NCCL as well: the system's folders may have an NCCL too.
    configured = run("cmake", "-S", options.source, "-B", build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=RelWithDebInfo", "-DMOE_CUDA=ON",
                     "-DMOE_NCCL=OFF", "-DMOE_RUN_CUDA=OFF", f"-DMOE_HOST_DEPS={options.host_deps}", f"-DMOE_CUDA_ROOT={toolkit}",
                     f"-DCMAKE_CXX_COMPILER={options.cxx}", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON",
                     *(("-DMOE_GROUP_FILES=4", "-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O1 -g0") if whole else ()))
    left_out = [line for line in configured.splitlines() if "NCCL" in line]

    def reaches_nccl(entry) -> str:
        """The preprocessor, shown this project's folders only: headers of others count as generated (-MG), which takes milliseconds
        instead of the seconds that nvcc needs to read them."""
        command = shlex.split(entry["command"])
        ours = [part for part in command if part.startswith("-D")
                or part.startswith("-I") and pathlib.Path(part[2:]).is_relative_to(options.source.resolve())]
        ours += ["-I" + str(options.source.resolve() / "include"), *(["-D__CUDACC__"] if entry["file"].endswith(".cu") else [])]
        reached = subprocess.run([options.cxx, "-x", "c++", "-std=c++20", "-nostdinc", "-M", "-MG", *ours, entry["file"]],
                                 cwd=entry["directory"], capture_output=True, text=True, check=False)
        if reached.returncode != 0:
            return f"{entry['file']}: {reached.stderr.strip()[:500]}"
        if "nccl.h" in reached.stdout.replace("\\\n", "").split() or "nccl_device" in reached.stdout:
            return f"{entry['file']} includes an NCCL header and is still built"
        return ""

    # Without the header tests, because the other tests include the same headers, and without sources that only the build writes.
    entries = [entry for entry in json.loads((build / "compile_commands.json").read_text())
               if entry["file"].endswith((".cpp", ".cu")) and "/tests/headers/" not in entry["file"] and os.path.exists(entry["file"])]
    asked = len(entries)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        problems = [problem for problem in pool.map(reaches_nccl, entries) if problem]
    if not problems and whole:  # hours: its output is shown as it comes
        command = ["cmake", "--build", build, "-j", os.environ.get("MOE_JOBS", str(os.cpu_count())), "--", "-k", "0"]
        if subprocess.run(command, check=False).returncode != 0:
            problems.append("a target does not build without NCCL")
    elif not problems:
        run("cmake", "--build", build, "--target", options.target, "-j", "2")
    for problem in problems:
        print(f"FAILED: {problem}")
    print("\n".join(left_out))
    print(f"{asked} sources without NCCL, {len(left_out)} programs left out, {len(problems)} problems; target {options.target}")
    return 1 if problems or not asked or not left_out else 0


if __name__ == "__main__":
    sys.exit(main())
