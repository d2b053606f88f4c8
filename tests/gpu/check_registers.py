#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares what ptxas reported of the optimised kernels with tests/gpu/kernel_registers.txt.

Fails if wgmma is serialised anywhere, if a function spills that the file gives no reason for, if the file does not list exactly these
kernels with these registers, spilled bytes and static shared memory, or if no line lists a kernel of include/moe: no optimised target
instantiates it, so tests/gpu/kernels.cu has to. Another release of nvcc allocates registers differently: with it the numbers are printed
and not compared. After an intended change:
    ninja -C build/cuda update_kernel_registers
which builds what is measured and rewrites the file; the lines with reasons stay.
"""
import argparse
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "headers"))
from check_layers import without_comments_and_strings  # noqa: E402

SERIALISED = re.compile(r"C7510|wgmma.*serializ", re.IGNORECASE)
ENTRY = re.compile(r"Compiling entry function '(\w+)'")
FUNCTION = re.compile(r"Function properties for (\w+)")
SPILL = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")
SCOPE = re.compile(r"\bnamespace\s+(?P<name>[\w:]+)\s*\{|(?P<open>\{)|(?P<close>\})|(?P<kernel>\b__global__\b)")
BEFORE_PARENTHESIS = re.compile(r"(\w+)\s*\(")


def read_logs(logs):
    """(mangled kernel -> [registers, stores, loads, shared], mangled function that is called and spills -> (stores, loads), problems)"""
    compiled, functions, problems = [], {}, []
    for log in logs:
        if not log.exists():
            problems.append(f"{log}: not there; build it first")
            continue
        entry = function = numbers = None
        for line in log.read_text().splitlines():
            if SERIALISED.search(line):
                problems.append(f"{log.name}: {line.strip()}")
            if found := ENTRY.search(line):
                entry = found.group(1)
                numbers = [0, 0, 0, 0]
                compiled.append((entry, numbers))
            elif found := FUNCTION.search(line):
                function = found.group(1)
            elif found := SPILL.search(line):
                spilled = (int(found.group(1)), int(found.group(2)))
                if function == entry:
                    numbers[1:3] = spilled
                elif any(spilled):
                    functions[function] = spilled
            elif found := USED.search(line):
                numbers[0] = int(found.group(1))
                shared = SHARED.search(line)
                numbers[3] = int(shared.group(1)) if shared else 0
    kernels = {}
    for entry, numbers in compiled:  # of a kernel in two objects the larger numbers
        kernels[entry] = [max(pair) for pair in zip(numbers, kernels.get(entry, numbers))]
    return kernels, functions, problems


def demangle(names):
    """Readable names without return type and parameters: the template arguments tell instances apart."""
    names = list(names)
    text = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True).stdout.splitlines()
    readable = {}
    for name, plain in zip(names, text):
        plain = re.sub(r"\(anonymous namespace\)|_INTERNAL_\w+?::", "", plain)
        depth = 0  # the parameter list opens at the first parenthesis outside of <>
        for at, letter in enumerate(plain):
            depth += (letter == "<") - (letter == ">")
            if letter == "(" and depth == 0:
                plain = plain[:at]
                break
        readable[name] = plain.removeprefix("void ").replace("unsigned long", "size_t")
    return readable


def declared_kernels(text):
    """The kernels that a header declares, with their namespaces and without template parameters."""
    code = without_comments_and_strings(text)
    scopes, kernels = [], []
    for found in SCOPE.finditer(code):
        if found["close"]:
            scopes.pop()
        elif not found["kernel"]:
            scopes.append(found["name"] or "")
        else:
            name = BEFORE_PARENTHESIS.search(code, found.end())
            while name[1].startswith("__"):  # __launch_bounds__(...)
                at, depth = name.end(), 1
                while depth:
                    depth += {"(": 1, ")": -1}.get(code[at], 0)
                    at += 1
                name = BEFORE_PARENTHESIS.search(code, at)
            kernels.append("::".join([*filter(None, scopes), name[1]]))
    return kernels


def without_entry(declared, listed, excepted):
    """Problems: kernels (name -> header) without a listed instance, and exceptions (name -> reason) without a reason or a use."""
    entries = {name.partition("<")[0] for name in listed}
    problems = [f"{name} of {header} is in no optimised target: instantiate it in tests/gpu/kernels.cu"
                for name, header in sorted(declared.items()) if name not in entries and name not in excepted]
    for name, reason in excepted.items():
        if not reason:
            problems.append(f"no reason: unlisted {name}")
        elif name in entries or name not in declared:
            problems.append(f"unlisted {name}: {'it is listed' if name in entries else 'there is no such kernel'}; the line can go")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--objects", required=True, type=pathlib.Path, help="file with one object a line; each has OBJECT.ptxas beside it")
    parser.add_argument("--nvcc", required=True, help="nvcc's version, as 13.0.88")
    parser.add_argument("--list", type=pathlib.Path, default=pathlib.Path(__file__).with_name("kernel_registers.txt"))
    parser.add_argument("--update", action="store_true", help="rewrite the list")
    options = parser.parse_args()
    objects = [line for line in options.objects.read_text().splitlines() if line.endswith(".cu.o")]
    kernels, functions, problems = read_logs([pathlib.Path(line + ".ptxas") for line in objects])
    if not kernels:
        problems.append(f"no kernel in the logs of {len(objects)} objects")

    head, reasons, excepted, listed, listed_nvcc = [], [], {}, {}, ""
    for line in options.list.read_text().splitlines() if options.list.exists() else []:
        if line.startswith(("#", "unlisted ")) or not line.strip():
            head.append(line)
            if line.startswith("unlisted "):
                name, _, reason = line.removeprefix("unlisted ").partition(" : ")
                excepted[name.strip()] = reason.strip()
        elif line.startswith("nvcc "):
            listed_nvcc = line.split()[1]
        elif line.startswith("spill "):
            pattern, _, reason = line.removeprefix("spill ").partition(" : ")
            reasons.append((pattern.strip(), reason.strip(), line))
            if not reason.strip():
                problems.append(f"{options.list.name}: no reason: {line}")
        else:
            *numbers, name = line.split(None, 4)
            listed[name] = [int(number) for number in numbers]

    readable = demangle([*kernels, *functions])
    found = {}
    for kernel, numbers in kernels.items():  # static kernels of two objects have two names here and one in the list
        name = readable[kernel]
        found[name] = [max(pair) for pair in zip(numbers, found.get(name, numbers))]
    spilling = {name: tuple(numbers[1:3]) for name, numbers in found.items() if any(numbers[1:3])}
    spilling |= {readable[name]: spilled for name, spilled in functions.items()}
    for name, (stores, loads) in sorted(spilling.items()):
        if not any(re.search(pattern, name) for pattern, _, _ in reasons):
            problems.append(f"{name} spills {stores} bytes of stores, {loads} bytes of loads, and {options.list.name} gives no reason")
    for pattern, _, _ in reasons:
        if not any(re.search(pattern, name) for name in spilling):
            print(f"note: nothing that matches '{pattern}' spills any more; its line in {options.list.name} can go")

    if options.update:
        rows = [f"{registers:9} {stores:12} {loads:11} {shared:6}  {name}"
                for name, (registers, stores, loads, shared) in sorted(found.items())]
        text = [*head, *(line for _, _, line in reasons), f"nvcc {options.nvcc}", *rows]
        if not problems or all("spills" in problem for problem in problems):
            options.list.write_text("\n".join(text) + "\n")
            print(f"{options.list}: {len(rows)} kernels written")
    elif listed_nvcc != options.nvcc:
        print(f"nvcc {options.nvcc}, the list is of {listed_nvcc}: registers are not compared")
        for name, numbers in sorted(found.items()):
            if listed.get(name) != numbers:
                print(f"  {numbers} {name}; listed {listed.get(name)}")
    else:
        for name in sorted(found.keys() | listed.keys()):
            if found.get(name) != listed.get(name):
                problems.append(f"{name}: [registers, spill stores, spill loads, shared] {found.get(name)}, listed {listed.get(name)}")
    declared = {name: header.relative_to(ROOT) for header in sorted((ROOT / "include" / "moe").rglob("*.cuh"))
                for name in declared_kernels(header.read_text())}
    problems += without_entry(declared, found if options.update else listed, excepted)
    for problem in problems:
        print(f"FAILED: {problem}")
    if problems:
        print("If the change is meant: ninja -C build/cuda update_kernel_registers")
    print(f"{len(found)} kernels of {len(objects)} objects, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
