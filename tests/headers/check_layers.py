#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the headers against docs/architecture.md: who may include whom, inline assembly in core/ptx only, lengths of files and functions,
parameters of kernels, licence line, no .cuh in a .hpp, what no header may contain, no way from moe.hpp to <mpi.h>. Of tests, benchmarks,
examples, capi/ and python/src the lengths of headers and functions; of tests that a program whose every case was skipped does not count as
passed."""
import argparse
import pathlib
import re
import sys

LEVEL = {"core": 0, "routing": 1, "quantization": 1, "activation": 1, "comm": 1, "parallel": 1, "backends": 2, "experts": 2, "layer": 3,
         "archetypes": 3, "eplb": 5, "runner": 5, "io": 5, "models": 6}
TOP = {"moe.h": 0, "modular_kernel.hpp": 4, "modular_kernel.cuh": 4}
MAX_LINES = 400
MAX_FUNCTION_LINES = 120
MAX_KERNEL_LINES = 150
HEADERS = (".hpp", ".cuh", ".h")
EXCUSE = re.compile(r"// Longer than \d+ lines: \S")  # on a line right above the function
MAX_KERNEL_PARAMETERS = 6
PARAMETER_EXCUSE = re.compile(r"// More than \d+ parameters: \S")  # on a line right above the kernel
# Headers whose kernels may take more, and why.
MANY_PARAMETERS = {"moe/experts/cuda_reference": "the oracle of the other experts, which reads like its formula"}


def layer_of(path: str) -> tuple[int, str]:
    parts = path.split("/")[1:]
    return (LEVEL.get(parts[0], 7), parts[0]) if len(parts) > 1 else (TOP.get(parts[0], 7), parts[0])


def exchange_room(parts: list[str]) -> tuple[int, str]:
    """Level and policy of a header below backends/. 0: common; 1: what policies promise; 2: what exchanges of one kind share; 3: theirs."""
    if parts[0] == "common":
        return 0, ""
    if len(parts) == 1:
        return 1, parts[0].split(".")[0]
    if parts[:2] == ["window", "device"] and parts[2] != "common":
        return 3, parts[2].split(".")[0]
    return 2, "/".join(parts[:3]) if parts[0] == "window" and parts[1] == "device" else "/".join(parts[:-1])


def expert_room(parts: list[str]) -> tuple[int, str]:
    """Level and room of a header below experts/. 0: common, hopper/common; 1: one kernel's folder; 2: what policies share: weights.hpp and
    the engines over the kernels; 3: one policy, X.hpp, X.cuh and the folder X."""
    if parts[0] == "common" or parts[:2] == ["hopper", "common"]:
        return 0, ""
    if parts[0] == "hopper":
        return (1, parts[1]) if len(parts) > 2 else (2, "")
    return (2, "") if parts == ["weights.hpp"] else (3, parts[0].split(".")[0])


def border(source: str, target: str) -> str:
    """Why `source` may not include `target` of the same layer; empty if it may."""
    _, layer, *rest = source.split("/")
    _, _, *other = target.split("/")
    if not rest or not other:
        return ""
    if layer == "experts":
        (level, room), (other_level, other_room) = expert_room(rest), expert_room(other)
        if other_level > level:
            return ("what all kernels share includes one of them", "a kernel's folder includes what is above it",
                    "what policies share includes one of them")[level]
        if level == other_level and room != other_room:
            return "a kernel's folder includes another's" if level == 1 else "a policy includes another's header"
    if layer == "backends":
        (level, room), (other_level, other_room) = exchange_room(rest), exchange_room(other)
        if level == 1 and other[0] == "collective":
            return ""  # a policy over collectives is its exchange
        if other_level > level:
            return "the border goes the other way"
        if level == other_level and room != other_room:
            return "neither may include the other"
        if level == 3 and other_level == 1 and room != other_room:
            return "a policy includes another's header"
    return ""


def without_comments_and_strings(text: str) -> str:
    """The same lines, with comments, strings and preprocessor lines blanked."""
    pattern = re.compile(r'//[^\n]*|/\*.*?\*/|R"([^()\\\s]{0,16})\((?:.*?)\)\1"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'|'
                         r'^[ \t]*#(?:\\\n|[^\n])*', re.S | re.M)
    return pattern.sub(lambda found: "\n" * found.group(0).count("\n"), text)


LABELS = re.compile(r"\s*(?:(?:public|private|protected)\s*:(?!:)\s*)*")
# Heads below have blanks in their parentheses, brackets and braces, and no template parameters.
SCOPE = re.compile(r"(?:inline\s+|export\s+|static\s+|typedef\s+)*(?:namespace|class|struct|union|enum)\b|extern\s*$")
CONSTRAINED_SCOPE = re.compile(r"requires\b.*\b(?:class|struct|union)\b", re.S)
STATEMENT = re.compile(r"(?:if|for|while|switch|do|else|catch|return)\b")
LAMBDA = re.compile(r"(?:^|[=(,&|?:<!])\s*\[\s*\]\s*(?:<[^;]*>\s*)?(?:\(\s*\)\s*)?"
                    r"(?:(?:mutable|constexpr|noexcept|static|__host__|__device__|\(\s*\))\s*)*(?:->[^;=]*)?$")
REQUIRES = re.compile(r"\brequires\s*$|(?:\brequires|&&|\|\||[=!(,])\s*requires\s*\(\s*\)\s*$")
ASSIGNED = re.compile(r"(?<![=!<>+\-*/%&|^])=(?!=)")
OPERATOR = re.compile(r"\boperator\s*[^\w\s(]+")
INITIALISERS = re.compile(r"\).*?(?<!:):(?!:)", re.S)


def without_template_parameters(head: str) -> str:
    """The head without `template <...>`, however it is nested; ends within the list if that is still open."""
    while found := re.search(r"\btemplate\s*<", head):
        at, depth = found.end(), 1
        while at < len(head) and depth:
            depth += {"<": 1, ">": 0 if head[at - 1] == "-" else -1}.get(head[at], 0)
            at += 1
        if depth:
            return head[:found.start()] + " <"
        head = head[:found.start()] + head[at:].lstrip()
    return head


def opened(head: str, in_parentheses: bool) -> str:
    """What a brace behind this head opens, outside functions: a "function", a "lambda", a "scope" (namespace, class), or a "part" of the
    declaration, which goes on behind the closing brace as it does behind a lambda."""
    head = without_template_parameters(head).strip()
    if REQUIRES.search(head):
        return "part"
    if LAMBDA.search(head):
        return "lambda"
    if in_parentheses:
        return "part"
    if SCOPE.match(head) and not (ASSIGNED.search(head) or re.search(r"\)\s*(?:const|noexcept|override|final|\s)*$", head)):
        return "scope"
    if CONSTRAINED_SCOPE.match(head) or STATEMENT.match(head):
        return "scope"
    if "(" not in head or ASSIGNED.search(OPERATOR.sub("operator", head)):
        return "part"
    # A brace behind `)`, `}` or `...` opens the constructor's body, any other a member initialiser.
    return "part" if INITIALISERS.search(head) and not re.search(r"(?:[)}]|\.\.\.)(?:\s*try)?$", head) else "function"


def long_functions(text: str) -> list[tuple[int, int, int, str]]:
    """(first line, lines, bound, head) of each function that is longer than its bound. Lambdas and blocks belong to their function; a
    lambda outside functions counts as one."""
    code = without_comments_and_strings(text)
    flat = list(code)  # the code, with blanks in the parentheses, brackets and braces of each declaration
    found = []
    stack = []  # the open braces: (where, what it opened, where its declaration begins, the parentheses open there)
    begin, open_at, inside = 0, [], 0

    def blank(first: int, last: int):
        flat[first:last] = [char if char == "\n" else " " for char in flat[first:last]]

    for at, char in enumerate(code):
        if char == "{":
            kind = "block"
            if not inside:
                # Within parentheses, what stands in the innermost ones.
                head = "".join(flat[open_at[-1] if open_at else begin:at])
                kind = opened(head if open_at else head[LABELS.match(head).end():], bool(open_at))
            stack.append((at, kind, begin, open_at))
            inside += inside > 0 or kind in ("function", "lambda")
            begin, open_at = at + 1, []
        elif char == "}" and stack:
            brace, kind, declaration, open_at = stack.pop()
            inside -= inside > 0
            if kind in ("function", "lambda"):
                start = "".join(flat[:brace]).rindex("[") if kind == "lambda" else LABELS.match(code, declaration).end()
                head = code[start:brace].strip()
                first, bound = code[:start].count("\n") + 1, MAX_KERNEL_LINES if "__global__" in head else MAX_FUNCTION_LINES
                lines = code[:at].count("\n") + 2 - first
                if lines > bound:
                    found.append((first, lines, bound, without_template_parameters(head).strip().splitlines()[0]))
            if kind in ("part", "lambda"):
                blank(brace + 1, at)
                begin = declaration
            else:
                begin, open_at = at + 1, []
        elif inside:
            continue
        elif char == ";":
            begin, open_at = at + 1, []
        elif char in "([":
            open_at = [*open_at, at]
        elif char in ")]" and open_at:
            blank(open_at[-1] + 1, at)
            open_at = open_at[:-1]
    return found


def wide_kernels(text: str) -> list[tuple[int, str, int]]:
    """(line of __global__, name, parameters) of each kernel that takes more parameters than MAX_KERNEL_PARAMETERS."""
    code = without_comments_and_strings(text)
    found = []
    for kernel in re.finditer(r"\b__global__\b", code):
        name, begin, at, depth, commas = "", kernel.end(), kernel.end(), 0, 0
        while at < len(code) and not (depth == 0 and code[at] in "{;"):
            if depth == 0 and code[at] == "(":  # __launch_bounds__(...), or the parameters
                name, begin, commas = re.search(r"\w*\s*$", code[:at])[0].strip(), at + 1, 0
            commas += depth == 1 and code[at] == ","
            depth += {"(": 1, "<": 1, "[": 1, "{": 1, ")": -1, ">": -1, "]": -1, "}": -1}.get(code[at], 0)
            at += 1
            if depth == 0 and code[at - 1] == ")" and not name.startswith("__"):
                break
        parameters = commas + 1 if code[begin:at - 1].strip() else 0
        if parameters > MAX_KERNEL_PARAMETERS:
            found.append((code[:kernel.start()].count("\n") + 1, name, parameters))
    return found


def unread_skips(text: str) -> list[int]:
    """The lines where RUN_ALL_TESTS() is no argument of exit_code(): a run whose every case is skipped would count as passed."""
    code = without_comments_and_strings(text)
    return [code[:found.start()].count("\n") + 1 for found in re.finditer(r"\bRUN_ALL_TESTS\b", code)
            if not re.search(r"\bexit_code\(\s*$", code[:found.start()])]


# What no header may contain, and why.
FORBIDDEN = (
    (re.compile(r"^\s*#\s*pragma\s+omp\b(?!\s+simd\b)", re.M), "OpenMP's threads spin as OMP_WAIT_POLICY says; use HostPool"),
    (re.compile(r"\bMPI_Win(?:_\w+)?\b"), "MPI_Finalize waits for a window that a dead rank has not freed; use POSIX shared memory"),
    (re.compile(r"^(?!\s*template)[^\n;]*(?:\binline\s+__global__|__global__\s+(?:void\s+)?inline)\b", re.M),
     "nvcc warns of it in a user's program (20050); write static __global__"),
)


def assembly(text: str) -> list[int]:
    """The lines of inline assembly: asm, __asm or __asm__."""
    return [number for number, line in enumerate(without_comments_and_strings(text).splitlines(), 1)
            if re.search(r"\b(?:__)?asm(?:__)?\b", line)]


def too_long(name: str, text: str) -> list[str]:
    """The problem of a header, of C++ or of C, that has more than MAX_LINES lines; other files may."""
    lines = len(text.splitlines())
    return [f"{name}: {lines} lines, at most {MAX_LINES}"] if name.endswith(HEADERS) and lines > MAX_LINES else []


def forbidden(text: str) -> list[tuple[int, str]]:
    """(line, why) of what no header may contain."""
    return sorted((text[:found.start()].count("\n") + 1, why) for pattern, why in FORBIDDEN for found in pattern.finditer(text))


def way_to_mpi(reach: dict[str, list[str]], begin: str, with_mpi: set[str]) -> list[str]:
    """The headers from `begin` to one that includes <mpi.h>; empty if there is no way."""
    above, ways = set(), [[begin]]
    while ways:
        way = ways.pop()
        if way[-1] in with_mpi:
            return way
        for target in reach.get(way[-1], []):
            if target not in above:
                above.add(target)
                ways.append([*way, target])
    return []


def includes(include: pathlib.Path, headers: list[pathlib.Path]) -> dict[str, list[str]]:
    """The headers that each header includes."""
    return {path.relative_to(include).as_posix(): re.findall(r'^#\s*include ["<](moe/[^">]+)[">]', path.read_text(), re.M)
            for path in headers}


def folders(reach: dict[str, list[str]]) -> dict[str, list[str]]:
    """The same between folders."""
    found: dict[str, set[str]] = {}
    for name, targets in reach.items():
        found.setdefault(name.rpartition("/")[0], set()).update(target.rpartition("/")[0] for target in targets)
    return {name: sorted(targets - {name}) for name, targets in found.items()}


def cycles(reach: dict[str, list[str]]) -> list[str]:
    """Each cycle once, as "a -> b -> a"."""
    found, state = [], {}

    def visit(name: str, above: list[str]):
        state[name] = "open"
        for target in reach.get(name, []):
            if state.get(target) == "open":
                found.append(" -> ".join([*above[above.index(target):], target]))
            elif target not in state:
                visit(target, [*above, target])
        state[name] = "done"

    for name in reach:
        if name not in state:
            visit(name, [name])
    return found


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
        if not any(line.strip() == "#pragma once" for line in lines):
            problems.append(f"{name}: no #pragma once")
        text = path.read_text()
        problems += too_long(name, text)
        for first, length, bound, head in long_functions(text):
            if not any(EXCUSE.search(line) for line in lines[max(0, first - 4):first]):
                problems.append(f"{name}:{first}: {length} lines, at most {bound}: {head}")
        if not name.startswith(tuple(MANY_PARAMETERS)):
            problems += [f"{name}:{first}: {kernel} takes {count} parameters, at most {MAX_KERNEL_PARAMETERS}: make them one struct"
                         for first, kernel, count in wide_kernels(text)
                         if not any(PARAMETER_EXCUSE.search(line) for line in lines[max(0, first - 4):first])]
        if not name.startswith("moe/core/ptx/"):
            problems += [f"{name}:{number}: inline assembly stands in core/ptx only" for number in assembly(text)]
        problems += [f"{name}:{number}: {why}" for number, why in forbidden(text)]
        level, layer = layer_of(name)
        for number, line in enumerate(lines, 1):
            found = re.match(r'\s*#\s*include\s*[<"](moe/[^>"]+)[>"]', line)
            if not found:
                if re.match(r'\s*#\s*include\s*"', line):
                    problems.append(f"{name}:{number}: include by <moe/...>: {line.strip()}")
                continue
            target = found.group(1)
            if path.suffix == ".hpp" and target.endswith(".cuh"):
                problems.append(f"{name}:{number}: a .hpp includes {target}, which needs nvcc")
            target_level, target_layer = layer_of(target)
            if target_layer == layer:
                if why := border(name, target):
                    problems.append(f"{name}:{number}: includes {target}: {why}")
                continue
            if target_level >= level:
                problems.append(f"{name}:{number}: {layer} (level {level}) includes {target} (level {target_level})")
    reach = includes(include, headers)
    problems += [f"includes in a circle: {cycle}" for cycle in cycles(reach)]
    problems += [f"folders include each other in a circle: {cycle}" for cycle in cycles(folders(reach))]
    with_mpi = {path.relative_to(include).as_posix() for path in headers if re.search(r"#\s*include\s*<mpi\.h>", path.read_text())}
    if way := way_to_mpi(reach, "moe/moe.hpp", with_mpi):
        problems.append(f"a program without MPI includes moe.hpp, which includes <mpi.h>: {' -> '.join(way)}")
    # The C interface: no layer, and not the form of a C++ header.
    c_headers = sorted(include.rglob("*.h"))
    for path in c_headers:
        name = path.relative_to(include).as_posix()
        text = path.read_text()
        problems += too_long(name, text)
        problems += [f"{name}:{number}: inline assembly stands in core/ptx only" for number in assembly(text)]
    # The rest of the sources: the lengths, where a test or benchmark file that is no header may be long, and a test's exit code.
    others = sorted(path for folder in ("tests", "bench", "examples", "capi", "python/src") for path in (root / folder).rglob("*")
                    if path.suffix in (*HEADERS, ".cpp", ".cu"))
    for path in others:
        name = path.relative_to(root).as_posix()
        text = path.read_text()
        lines = text.splitlines()
        problems += too_long(name, text)
        for first, length, bound, head in long_functions(text):
            if not any(EXCUSE.search(line) for line in lines[max(0, first - 4):first]):
                problems.append(f"{name}:{first}: {length} lines, at most {bound}: {head}")
        if name.startswith("tests/"):
            problems += [f"{name}:{number}: write moe_test::exit_code(RUN_ALL_TESTS()) (exit_code.hpp): RUN_ALL_TESTS() alone reports a "
                         "program as passed if every case was skipped" for number in unread_skips(text)]
    for problem in problems:
        print(f"FAILED: {problem}")
    print(f"{len(headers) + len(c_headers)} headers, {len(others)} other sources, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
