#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Configures the CMake blocks of README.md and docs/*.md as projects on an installed package, and runs the line "cc experts.c …" of
docs/c.md. The blocks of a page follow each other in one project, until one that makes `program` anew. A block that asks for the component
cuda is written to the file --cuda-block, which tests/install/cuda_consumer includes."""
import argparse
import pathlib
import re
import shutil
import subprocess
import sys

# Targets of a project that are compiled, because that is quick. The others are like those of tests/install/model_library.
BUILT = ("layers_check",)


def projects(text: str) -> list[str]:
    """The CMake projects of a page."""
    found: list[str] = []
    for block in re.findall(r"^```cmake\n(.*?)^```", text, re.M | re.S):
        begins = "add_executable(program" in block
        if not found or begins:
            found.append("" if begins else "add_executable(program program.cpp)\n")
        found[-1] += block
    return found


def needs_cuda(project: str) -> bool:
    return re.search(r"COMPONENTS [^)]*\bcuda\b", project) is not None


def run(command: list[str] | str, folder: pathlib.Path) -> str | None:
    """What is wrong with a command, or None."""
    done = subprocess.run(command, cwd=folder, shell=isinstance(command, str), capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"{command}: exit code {done.returncode}: {done.stdout[-1000:]}{done.stderr[-3000:]}"


def check_project(project: str, folder: pathlib.Path, arguments) -> str | None:
    folder.mkdir(parents=True)
    for name in ("program.cpp", "export.cpp"):
        (folder / name).write_text("int main() {}\n")
    shutil.copy(arguments.root / "tests" / "install" / "model_library" / "models.hpp", folder / "layers.hpp")
    (folder / "CMakeLists.txt").write_text(f"cmake_minimum_required(VERSION 3.25)\nproject(page LANGUAGES C CXX)\n{project}")
    problem = run([arguments.cmake, "-G", "Ninja", "-S", ".", "-B", "build", f"-DCMAKE_PREFIX_PATH={arguments.prefix}",
                   f"-DCMAKE_CXX_COMPILER={arguments.cxx}", *arguments.option], folder)
    built = [name for name in BUILT if name in project]
    return problem or (run([arguments.cmake, "--build", "build", "--target", *built], folder) if built else None)


def check_cc(arguments) -> str | None:
    """The line of docs/c.md that compiles its first program, with this package's folder, and the program."""
    lines = re.findall(r"^    (cc experts\.c .+)$", (arguments.root / "docs" / "c.md").read_text(), re.M)
    if len(lines) != 1 or "/opt/moe" not in lines[0]:
        return f"docs/c.md: expected one line \"cc experts.c …\" with /opt/moe, found {lines}"
    folder = arguments.work / "cc"
    folder.mkdir(parents=True)
    shutil.copy(arguments.root / "examples" / "c" / "experts.c", folder)
    return run(lines[0].replace("/opt/moe", str(arguments.prefix)) + " && ./a.out", folder)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", required=True, type=pathlib.Path)
    parser.add_argument("--cuda-block", type=pathlib.Path, help="only write the block that needs CUDA to this file")
    parser.add_argument("--prefix", type=pathlib.Path, help="where the package is installed")
    parser.add_argument("--work", type=pathlib.Path)
    parser.add_argument("--cmake")
    parser.add_argument("--cxx")
    parser.add_argument("--libmoe", action="store_true", help="the package has the component c")
    parser.add_argument("--option", action="append", default=[], help="of the configure steps")
    arguments = parser.parse_args()
    pages = [arguments.root / "README.md", *sorted((arguments.root / "docs").glob("*.md"))]
    found = [(page.name, project) for page in pages for project in projects(page.read_text())]
    cuda = [project for _, project in found if needs_cuda(project)]
    if arguments.cuda_block:
        if len(cuda) != 1:
            print(f"FAILED: expected one block that needs CUDA, found {cuda}")
            return 1
        arguments.cuda_block.write_text(cuda[0])
        return 0
    shutil.rmtree(arguments.work, ignore_errors=True)
    problems, ran = [], 0
    for page, project in found:
        if needs_cuda(project) or (page == "c.md" and not arguments.libmoe):
            continue
        ran += 1
        if problem := check_project(project, arguments.work / f"{page}_{ran}", arguments):
            problems.append(f"{page}: {problem}\n{project}")
    if arguments.libmoe and (problem := check_cc(arguments)):
        problems.append(problem)
    for problem in problems:
        print(f"FAILED: {problem}")
    print(f"{ran} projects, {len(problems)} problems")
    return 1 if problems or not ran else 0


if __name__ == "__main__":
    sys.exit(main())
