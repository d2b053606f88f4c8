#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks one program that must not compile, under g++, clang++ or nvcc.

The file states its demands in comment lines:
    // expect: <text>     the first error's line must contain this text (several lines: all of them)
    // prints: <text>     the rule prints this value (several lines: these, in order); "a | b" where the compilers name one type differently
    // shows: <text>      the output of g++ and clang++, which print lines of source, has this text
    <code>  // named       the output names this line, as the one that must be changed
    // errors: any        more than one error is allowed; without it exactly one "error:" line is demanded
    // errors: each       as many errors as expect lines, the text of each in its own, in order: one mistake after the other; each
                          expect line is followed by the prints lines of its error, or the file has none
With -DMOE_FIXED the file must compile: what fails is the mistake and nothing else. nvcc, the slowest, is not asked that: its first error
has to be the right one, and all that the fixed forms use is compiled by it elsewhere.
"""
import argparse
import pathlib
import re
import subprocess
import sys

ERROR = re.compile(r"\berror(?: #[-\w]+)?: ")


def flags_for(front: str, flags: list[str]) -> list[str]:
    """Of the arguments of a user's translation unit for g++, those that the front end knows."""
    if front == "clang":
        return [*flags, "-fno-openmp", "-Wno-unknown-pragmas", "-Wno-unknown-warning-option"]
    if front == "nvcc":
        kept = [f"-isystem={flag.removeprefix('-isystem')}" if flag.startswith("-isystem") else flag for flag in flags
                if flag.startswith(("-std", "-I", "-D", "-isystem"))]
        return [*kept, "-DMOE_HAS_CUDA=1", "--expt-relaxed-constexpr", "-gencode=arch=compute_90a,code=sm_90a", "-x", "cu"]
    return flags


def compared(output: str) -> list[list[str]]:
    """What each broken rule printed: the arguments of Broken<...>, which nvcc calls Found."""
    rules = []
    for found in re.finditer(r"Broken<Found\.\.\.>.*?Found=<" if "Found=<" in output else r"::Broken<", output):
        values, depth = [""], 1
        for letter in output[found.end():]:
            depth += (letter in "<(") - (letter in ">)")
            if depth == 0:
                break
            if letter == "," and depth == 1:
                values.append("")
            else:
                values[-1] += letter
        rules.append(values)
    return rules


def wrong_values(values: list[str], printed: list[str]) -> list[str]:
    """Where the values of a rule are not those that the file states."""
    if len(values) != len(printed):
        return [f"the rule prints {values}, the file has {len(printed)} lines '// prints: <value>'"]
    return [f"the rule prints {value}, expected {text}" for value, text in zip(values, printed)
            if not any(one.strip() in value for one in text.split(" | "))]


def unnamed(path: pathlib.Path, source: str, output: str) -> list[str]:
    """The lines of a file that the output should name and does not: FILE:12: or, of nvcc, FILE(12) or `at line 12 of "FILE"`."""
    lines = [number for number, line in enumerate(source.splitlines(), 1) if line.endswith("// named")]
    name = re.escape(path.name)
    return [f"line {n} is not named" for n in lines if not re.search(rf"{name}(:{n}:|\({n}\))|at line {n} of \S*{name}", output)]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--compiler", required=True)
    parser.add_argument("--front", choices=("g++", "clang", "nvcc"), default="g++")
    parser.add_argument("--flags", required=True, help="file with one compiler argument a line")
    parser.add_argument("--archetypes",
                        help="beside it its precompiled form, .gch or .pch, for files whose first include is archetypes.hpp")
    parser.add_argument("file", type=pathlib.Path)
    options = parser.parse_args()

    source = options.file.read_text()
    demands = [(word, text.strip()) for word, text in re.findall(r"//\s*(expect|prints):\s*(.+)", source)]
    expected, printed = ([text for is_word, text in demands if is_word == word] for word in ("expect", "prints"))
    by_error: list[list[str]] = []  # the prints lines behind each expect line
    for word, text in demands:
        if word == "expect":
            by_error.append([])
        elif by_error:
            by_error[-1].append(text)
    if not expected:
        print(f"{options.file}: no line '// expect: <text>'")
        return 1
    counts = re.search(r"//\s*errors:\s*(any|each)", source)
    counts = counts.group(1) if counts else "one"

    flags = flags_for(options.front, [line for line in pathlib.Path(options.flags).read_text().splitlines() if line])
    first = re.search(r'^#include ["<](.+)[">]', source, re.MULTILINE)
    if options.front == "nvcc":
        command = [options.compiler, *flags, "-cuda", "-fdevice-syntax-only", "-o", "/dev/null", str(options.file)]
    else:
        if options.archetypes and first and first.group(1) == "../archetypes.hpp":
            flags += ["-include", options.archetypes] if options.front == "g++" else ["-include-pch", f"{options.archetypes}.pch"]
        command = [options.compiler, *flags, "-fsyntax-only", "-fdiagnostics-color=never", str(options.file)]

    broken = subprocess.run(command, capture_output=True, text=True)
    output = broken.stdout + broken.stderr
    errors = [line for line in output.splitlines() if ERROR.search(line)]
    problems = [f"the condition precedes the sentence: {line}" for line in errors
                if "rule.hpp" in output and 'due to requirement' in line]  # clang++ puts a rule's condition before its sentence
    if broken.returncode == 0:
        problems.append("it compiles, and must not")
    elif counts == "each":
        problems += [f"error {i + 1} does not contain: {text}" for i, (text, line) in enumerate(zip(expected, errors)) if text not in line]
        if len(errors) != len(expected):
            problems.append(f"{len(errors)} errors, expected {len(expected)}")
        rules = compared(output) if printed else []
        if printed and len(rules) != len(errors):
            problems.append(f"{len(errors)} errors print the values of {len(rules)} rules")
        problems += [problem for values, texts in zip(rules, by_error) for problem in wrong_values(values, texts)]
    else:
        reported = errors[0] if errors else ""
        problems += [f"the first error does not contain: {text}" for text in expected if text not in reported]
        if len(errors) != 1 and counts == "one":
            problems.append(f"{len(errors)} errors, expected 1")
        problems += wrong_values((compared(output) or [[]])[0], printed)

    problems += unnamed(options.file, source, output)
    if options.front != "nvcc":
        problems += [f"nothing shows: {text}" for text in re.findall(r"//\s*shows:\s*(.+)", source) if text.strip() not in output]
        fixed = subprocess.run([*command, "-DMOE_FIXED"], capture_output=True, text=True)
        if fixed.returncode != 0:
            problems.append("with -DMOE_FIXED it must compile, and does not:\n" + fixed.stderr[:4000])

    print(f"{options.file.name}: {len(errors)} error(s); first: {errors[0] if errors else '-'}")
    for problem in problems:
        print(f"FAILED: {problem}")
    if problems and broken.returncode != 0:
        print("--- the compiler's output\n" + output[:8000])
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
