#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the headers against docs/architecture.md: who may include whom, length, licence line, no .cuh in a .hpp."""
import argparse
import pathlib
import re
import sys

LEVEL = {"core": 0, "routing": 1, "quantization": 1, "activation": 1, "comm": 1, "parallel": 1, "backends": 2, "experts": 2,
         "eplb": 4, "runner": 4, "io": 4, "models": 5}
TOP = {"modular_kernel.hpp": 3, "modular_kernel.cuh": 3}
MAX_LINES = 500


def place(path: str) -> tuple[int, str]:
    parts = path.split("/")[1:]
    return (LEVEL.get(parts[0], 6), parts[0]) if len(parts) > 1 else (TOP.get(parts[0], 6), parts[0])


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", required=True, type=pathlib.Path)
    root = parser.parse_args().root
    include = root / "include"
    problems = []
    headers = sorted(path for path in include.rglob("*") if path.suffix in (".hpp", ".cuh"))
    for path in headers:
        name = path.relative_to(include).as_posix()
        lines = path.read_text().splitlines()
        if not lines or "SPDX-License-Identifier: Apache-2.0" not in lines[0]:
            problems.append(f"{name}:1: the first line must be the SPDX line")
        if len(lines) < 2 or not lines[1].startswith("// " + name.removeprefix("moe/") + ":"):
            problems.append(f"{name}:2: the second line must be '// {name.removeprefix('moe/')}: what it is for'")
        if len(lines) > MAX_LINES:
            problems.append(f"{name}: {len(lines)} lines, at most {MAX_LINES}")
        if not any(line.strip() == "#pragma once" for line in lines):
            problems.append(f"{name}: no #pragma once")
        level, layer = place(name)
        for number, line in enumerate(lines, 1):
            found = re.match(r'\s*#\s*include\s*[<"](moe/[^>"]+)[>"]', line)
            if not found:
                if re.match(r'\s*#\s*include\s*"', line):
                    problems.append(f"{name}:{number}: include by <moe/...>: {line.strip()}")
                continue
            target = found.group(1)
            if path.suffix == ".hpp" and target.endswith(".cuh"):
                problems.append(f"{name}:{number}: a .hpp includes {target}, which needs nvcc")
            target_level, target_layer = place(target)
            if target_layer == layer:
                continue
            if target_level >= level:
                problems.append(f"{name}:{number}: {layer} (level {level}) includes {target} (level {target_level})")
    for problem in problems:
        print(f"FAILED: {problem}")
    print(f"{len(headers)} headers, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
