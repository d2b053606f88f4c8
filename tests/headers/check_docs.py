#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the documents: README's example is examples/readme.cpp, blocks that name a file are that file, every fenced block is run by a
test or marked as an excerpt, every link has a target, no line has more than 140 columns and no paragraph more than six lines, sources that
pages name exist (changelog and logs aside), tests that pages name exist, files, functions and sections of docs/semantics that comments name
exist, the times of models/preset_choice.hpp are those of docs/log/hopper.md, those of layer/schedule_choice.hpp of
docs/log/layers.md, and docs/errors.md has exactly the codes of core/error.hpp and the rules of the code, each with a program of
tests/compile_fail that breaks it. The examples of CODE_LINES and FILE_LINES are no longer than their bounds. Lines and comments of Python,
CMake and the scripts have the bounds of documents; clang-format keeps the lines of C++.
--write copies the files into the blocks that name them."""
import argparse
import pathlib
import re
import sys


def anchors(document: pathlib.Path) -> set[str]:
    found = set()
    fenced = False
    for line in document.read_text().splitlines():
        if line.startswith("```"):
            fenced = not fenced
        heading = re.match(r"#+ (.+)", line)
        if heading and not fenced:
            slug = re.sub(r"[^\w\- ]", "", heading.group(1).strip().lower()).replace(" ", "-")
            found.add(slug)
    return found


def form(text: str) -> list[str]:
    """Lines of more than 140 columns and paragraphs of more than six lines. Fenced code is exempt from both, a line that cannot be shorter
    because of its URL from the first; indented code and tables are no paragraphs."""
    problems = []
    fenced = False
    length = 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
            length = 0
            continue
        if fenced:
            continue
        if len(line) > 140 and not re.search(r"https?://\S{60}", line):
            problems.append(f"line {number} has {len(line)} columns, at most 140")
        if not line.strip() or line.lstrip().startswith(("|", "#")) or (length == 0 and line.startswith("    ")):
            length = 0
        elif re.match(r"\s*([*-]|\d+\.)\s", line):
            length = 1
        else:
            length += 1
        if length == 7:
            problems.append(f"line {number}: a paragraph of more than six lines")
    return problems


def code_form(text: str) -> list[str]:
    """The same of Python, CMake or shell: lines of more than 140 columns and paragraphs of comments of more than six lines. Indented
    comments are tables."""
    problems = []
    length = 0
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > 140 and not re.search(r"https?://\S{60}", line):
            problems.append(f"line {number} has {len(line)} columns, at most 140")
        length = length + 1 if re.match(r"\s*# ?[^\s#!]", line) and "SPDX-License-Identifier" not in line else 0
        if length == 7:
            problems.append(f"line {number}: a comment has a paragraph of more than six lines")
    return problems


def unrun_blocks(page: str, text: str) -> list[str]:
    """The fenced blocks that no test runs. Run are blocks that name their file (<!-- path -->), README's program, CMake
    (tests/install/docs_blocks.py), the Python of docs/python.md (tests/python/test_docs.py). <!-- excerpt: of what --> marks the rest."""
    problems, lines, fenced, programs = [], text.splitlines(), False, 0
    for number, line in enumerate(lines, 1):
        if not line.startswith("```"):
            continue
        fenced = not fenced
        if not fenced:
            continue
        before = lines[number - 2] if number > 1 else ""
        programs += page == "README.md" and line == "```cpp"
        run = line == "```cmake" or (page, line) == ("python.md", "```python") or (line == "```cpp" and programs == 1)
        if not run and not re.fullmatch(r"<!-- (\S+|excerpt: .+) -->", before):
            problems.append(f"line {number}: no test runs this block: name its file, <!-- path -->, or mark it <!-- excerpt: of what -->")
    return problems


# Limits: 25 lines of code for a block of a checkpoint, in either space; 60 lines for a file that uses all GPUs of a node, 40 for the one
# with a checkpoint.
CODE_LINES = {"examples/load_block.cpp": 25, "examples/model_library/qwen3_block_cuda.cpp": 25}
FILE_LINES = {"examples/expert_parallel_cuda.cu": 60, "examples/deepseek_block_cuda.cu": 40}


def sizes(name: str, text: str) -> list[str]:
    """Whether an example of CODE_LINES or FILE_LINES is longer than its bound."""
    lines = text.splitlines()
    code = sum(not re.match(r"\s*(//|$)", line) for line in lines)
    problems = []
    if code > CODE_LINES.get(name, code):
        problems.append(f"{name}: {code} lines that are neither blank nor a comment, at most {CODE_LINES[name]}")
    if len(lines) > FILE_LINES.get(name, len(lines)):
        problems.append(f"{name}: {len(lines)} lines, at most {FILE_LINES[name]}")
    return problems


def is_code(path: pathlib.Path) -> bool:
    """Whether code_form() checks this file."""
    return path.suffix in (".py", ".cmake") or path.name == "CMakeLists.txt" or (path.parent.name == "scripts" and not path.suffix)


def other_times(choices: str, table: str, names: dict[str, str]) -> list[str]:
    """Presets (struct names to model names) whose times in a comment, marked (H100), are not those of the model's row in the table."""
    problems = [] if "(H100)" in choices else ["no time is marked (H100)"]
    for times, preset in re.findall(r"((?:///[^\n]*\n)+)template <>\nstruct PresetChoice<(\w+)>", choices):
        found = re.search(r"([\d.]+) us for 64 tokens, ([\d.]+) for 16384 \(H100\)", re.sub(r"\n/// ?", " ", times))
        row = re.search(rf"^\| {re.escape(names[preset])}[,| ][^|]*\|[^|]*\| ([\d.]+) \|[^|]*\| ([\d.]+) \|", table, re.M)
        if found and (not row or found.groups() != row.groups()):
            problems.append(f"{preset}: {found.groups()} us, in the table {row and row.groups()}")
    return problems


def other_schedules(header: str, log: str) -> list[str]:
    """Rows of kScheduleTimes (layer/schedule_choice.hpp) whose ratios, or quotients of microseconds, are none of the log's: in its tables
    with a column for each number of tokens, of ratios or of microseconds (low_latency), in those with a row for each, and in the text on
    turns of bf16."""
    window, measured = "high_throughput", set()  # (backend, scheme, layer, tokens, dispatch, combine, both)
    list_of = r"\s([\d,\sand]+)"
    turns = re.search(rf"bf16,\s[^:]*µs, in turns,{list_of}tokens a rank: plain{list_of};.*?16 blocks{list_of}\.", log, re.S)
    for tokens, plain, overlapped in zip(*(re.findall(r"\d+", numbers) for numbers in (turns.groups() if turns else ()))):
        measured.add((window, "bf16", "Flash", tokens, f"{overlapped}.0 / {plain}.0", "", ""))
    for table in re.findall(r"(?:^ *\|.*\n)+", log, re.M):
        head, _, *rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in table.splitlines()]
        for row in rows:
            if head[0] == "tokens a rank" and head[1].isdigit():
                layer, _, scheme = row[0].partition(", ")
                for tokens, (first, *_, last) in zip(head[1:], (cell.split(", ") for cell in row[1:])):
                    found = (window, first) if float(first) < 10 else ("low_latency", f"{last} / {first}")
                    measured.add((found[0], scheme, layer, tokens, found[1], "", ""))
            elif head[0] == "tokens a rank":
                measured |= {(window, name, "Flash", row[0], *row[at + 1:at + 4]) for at, name in enumerate(head)
                             if name in ("fp8", "bf16")}
    rows = re.findall(r'\{"(\w+)", "\w+", "(\w+)", "(\w+)", \d+, (\d+), ([^,]+), ([^,]+), ([^,]+), detail::\w+\}', header)
    written = len(re.findall(r"detail::k\w+\}", header))
    problems = [] if written == len(rows) > 0 else [f"{len(rows)} of {written} rows are read"]
    for backend, scheme, *row in rows:
        seen = (backend, {"fp8_block128": "fp8", "none": "bf16"}[scheme], *(value.replace("kNotMeasured", "") for value in row))
        if seen not in measured:
            problems.append(f"the log has no {', '.join(filter(None, seen))}")
    return problems


def unknown_names(text: str, words: set[str], sources: list[str]) -> list[str]:
    """Files (folder/file.hpp) that no source ends with and functions (name()) that are no word of the code, in the comments of C++."""
    comments = " ".join(re.findall(r"//[^\n]*", text))
    files = re.findall(r"(?<![\w/.-])(?:[a-z0-9_]+/)+[a-z0-9_]+\.(?:hpp|cuh|cpp|cu)\b", comments)
    calls = re.findall(r"\b(?!cuda|nccl|cublas|omp_)[a-z]\w+(?=\(\))", comments)
    return [*(name for name in sorted(set(files)) if not any(source.endswith("/" + name) for source in sources)),
            *(f"{name}()" for name in sorted(set(calls) - words))]


def check_form() -> list[str]:
    """Whether the functions above see what they are for."""
    paragraph = "word\n" * 7
    seen = [bool(form(text)) for text in ("x" * 141, "ä" * 140, paragraph, paragraph[5:], "```\n" + "x" * 200 + "\n" + paragraph + "```",
                                          "* item\n" + "  word\n" * 6, "https://" + "x" * 140)]
    problems = []
    if seen != [True, False, True, False, False, True, False]:
        problems.append(f"check_docs.py: form() gets its examples wrong: {seen}")
    comment = "# word\n" * 7
    seen = [bool(unrun_blocks(page, text)) for page, text in (
        ("c.md", "```c\nint x;\n```"), ("c.md", "<!-- examples/a.c -->\n```c\n```"), ("c.md", "<!-- excerpt: a call -->\n```c\n```"),
        ("c.md", "```cmake\n```"), ("python.md", "```python\n```"), ("c.md", "```python\n```"), ("README.md", "```cpp\n```"),
        ("README.md", "```cpp\n```\n```cpp\n```"), ("README.md", "```\n```"))]
    if seen != [True, False, False, False, False, True, False, True, True]:
        problems.append(f"check_docs.py: unrun_blocks() gets its examples wrong: {seen}")
    seen = [bool(code_form(text)) for text in ("x" * 141, "x" * 140, comment, comment[7:], "  # word\n" * 7, "#   word\n" * 7,
                                               comment[7:] + "#\n" + comment[7:], "# https://" + "x" * 140)]
    if seen != [True, False, True, False, True, False, False, False]:
        problems.append(f"check_docs.py: code_form() gets its examples wrong: {seen}")
    seen = [bool(sizes(name, text)) for name, text in (
        ("examples/load_block.cpp", "a;\n" * 26), ("examples/load_block.cpp", "a;\n" * 25 + "  // b\n\n" * 50),
        ("examples/expert_parallel_cuda.cu", "a;\n" * 60 + "\n"), ("examples/expert_parallel_cuda.cu", "a;\n" * 60),
        ("examples/deepseek_block_cuda.cu", "a;\n" * 41), ("examples/a.cpp", "a;\n" * 100))]
    if seen != [True, False, True, False, True, False]:
        problems.append(f"check_docs.py: sizes() gets its examples wrong: {seen}")
    row = "| Model-1, one rank | bf16 | 51.7 | 1954 | 932 | 443 |\n"
    seen = [bool(other_times(f"/// 2 GB. Experts {times} (H100).\ntemplate <>\nstruct PresetChoice<Model_1>", row, {"Model_1": "Model-1"}))
            for times in ("51.7 us for 64 tokens, 932 for 16384", "51.8 us for 64 tokens, 932 for 16384",
                          "51.7 us for 64 tokens, 443 for 16384")]
    if seen != [False, True, True]:
        problems.append(f"check_docs.py: other_times() gets its examples wrong: {seen}")
    log = ("* bf16, 2 x H200,\n  µs, in turns, 256 and 512 tokens a rank: plain 453 and 510; overlapped 467 and 526, "
           "with 16 blocks 466 and 535.\n\n  | tokens a rank | 8 |\n  |--|--|\n  | Pro, fp8 | 180.2, 183.1 |\n\n"
           "  | tokens a rank | fp8 | | | |\n  |--|--|--|--|--|\n  | 1024 | 505 | 1.04 | 1.15 | 1.19 |\n")
    lacks = ", kNotMeasured, kNotMeasured"
    high, low = '{"high_throughput", "b", ', '{"low_latency", "b", '
    seen = [bool(other_schedules(row + ", detail::kSource},", text)) for row, text in (
        (high + '"none", "Flash", 2, 512, 535.0 / 510.0' + lacks, log), (low + '"fp8_block128", "Pro", 2, 8, 183.1 / 180.2' + lacks, log),
        (high + '"fp8_block128", "Flash", 2, 1024, 1.04, 1.15, 1.19', log), (high + '"none", "Flash", 2, 1024, 1.04, 1.15, 1.19', log),
        (high + '"fp8_block128", "Flash", 2, 1024, 1.04, 1.51, 1.19', log), (high + '"none", "Flash", 2, 256, 535.0 / 510.0' + lacks, log),
        (high + '"fp8_block128", "Pro", 2, 8, 183.1 / 180.2' + lacks, log), (high + '"none", "Flash", 2, 512, 535.0 / 510.0, moe', log),
        (high + '"none", "Flash", 2, 512, 535.0 / 510.0' + lacks, log.replace("in turns", "in one run")))]
    if seen != [False] * 3 + [True] * 6:
        problems.append(f"check_docs.py: other_schedules() gets its examples wrong: {seen}")
    seen = [unknown_names(text, {"call"}, ["/include/moe/a/b.hpp"]) for text in (
        "// a/b.hpp, call() and cudaFree()", "int gone();  // ../c.hpp, X.hpp, a/X.hpp", "// gone(), moe/a/b.hpp", "/// a/c.cuh")]
    if seen != [[], [], ["gone()"], ["a/c.cuh"]]:
        problems.append(f"check_docs.py: unknown_names() gets its examples wrong: {seen}")
    return problems


def unlisted_cases(root: pathlib.Path) -> list[str]:
    """Test names begin with the cases of docs/semantics that they hold, T4_T12_…: those that no page lists."""
    pages = "\n".join(path.read_text() for path in (root / "docs" / "semantics").glob("*.md"))
    problems = []
    for path in sorted([*root.glob("tests/**/*_test.cpp"), *root.glob("tests/**/*_test.cu")]):
        for cases in re.findall(r"\b(?:TYPED_)?TEST(?:_[FP])?\(\w+,\s*((?:[A-Z]\d+_)+)", path.read_text()):
            problems += [f"{path.relative_to(root)}: docs/semantics lists no case {case}"
                         for case in cases.split("_") if case and not re.search(rf"\b{case}\b", pages)]
    return problems


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", required=True, type=pathlib.Path)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    root = arguments.root
    problems = check_form()

    blocks = re.findall(r"```cpp\n(.*?)```", (root / "README.md").read_text(), re.S)
    example = (root / "examples" / "readme.cpp").read_text()
    if blocks[:1] != [example]:
        problems.append("README.md: its first C++ block differs from examples/readme.cpp")

    # A block of a document that names its file, "<!-- path -->" on the line before, is that file.
    named = r"(<!-- (\S+) -->\n```\w+\n)(.*?)(```)"
    for document in sorted((root / "docs").rglob("*.md")):
        if arguments.write:
            document.write_text(re.sub(named, lambda m: m[1] + (root / m[2]).read_text() + m[4], document.read_text(), flags=re.S))
        for _, name, block, _ in re.findall(named, document.read_text(), re.S):
            if not (root / name).is_file() or block != (root / name).read_text():
                problems.append(f"{document.relative_to(root)}: the block of {name} differs from that file")

    for name in (*CODE_LINES, *FILE_LINES):
        problems += sizes(name, (root / name).read_text())

    problems += unlisted_cases(root)
    errors = (root / "docs" / "errors.md").read_text()
    codes = re.findall(r"^\s+\w+,\s+///< (E_\w+)", (root / "include/moe/core/error.hpp").read_text(), re.M)
    if not codes or codes != re.findall(r"^\| `(E_\w+)` \|", errors, re.M):
        problems.append("docs/errors.md: its table of codes differs from core/error.hpp")
    rules = set(re.findall(r"^### (.+)", errors, re.M))
    expected = [text for path in root.glob("tests/compile_fail/*.cpp") for text in re.findall(r"// expect: (.+)", path.read_text())]
    tested = set()
    for path in sorted([*root.glob("include/**/*.hpp"), *root.glob("include/**/*.cuh")]):
        text = re.sub(r'"\s*\n\s*"', "", path.read_text())  # literals of several lines
        for literal, slug in re.findall(r'"([^"\n]*docs/errors\.md#([\w-]+)[^"\n]*)"', text):
            if slug not in rules:
                problems.append(f"{path.relative_to(root)}: docs/errors.md has no heading #{slug}")
            if any(part in literal or literal in part for part in expected):
                tested.add(slug)
    problems += [f"docs/errors.md: no test in tests/compile_fail breaks the rule {slug}" for slug in sorted(rules - tested)]

    for document in [root / "README.md", root / "CHANGELOG.md", *sorted((root / "docs").rglob("*.md")), root / "tests/data/README.md"]:
        problems += [f"{document.relative_to(root)}: {problem}" for problem in form(document.read_text())]
        text = re.sub(r"```.*?```", "", document.read_text(), flags=re.S)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if re.match(r"[a-z]+:", target):
                continue
            name, _, slug = target.partition("#")
            file = document.parent / name if name else document
            if not file.exists():
                problems.append(f"{document.relative_to(root)}: no such file: {target}")
            elif slug and slug not in anchors(file):
                problems.append(f"{document.relative_to(root)}: no such heading: {target}")

    for document in [root / "README.md", *sorted((root / "docs").glob("*.md"))]:
        problems += [f"{document.relative_to(root)}: {problem}" for problem in unrun_blocks(document.name, document.read_text())]

    folders = [root / name for name in ("include", "tests", "examples", "bench", "scripts", "cmake")]
    sources = [f"/{path.relative_to(root)}" for folder in folders for path in folder.rglob("*") if path.is_file()]
    code = {root / source[1:] for source in sources}
    code |= {path for name in ("capi", "packaging", "python") for path in (root / name).rglob("*")}
    for path in sorted({root / "CMakeLists.txt", *filter(is_code, code)}):
        problems += [f"{path.relative_to(root)}: {problem}" for problem in code_form(path.read_text())]

    for document in [root / "README.md", *sorted((root / "docs").glob("*.md")), *sorted((root / "docs" / "semantics").glob("*.md"))]:
        for name in sorted(set(re.findall(r"`([a-z0-9_]+(?:/[a-z0-9_]+)+\.(?:hpp|cuh|cpp|cu|py))`", document.read_text()))):
            if not any(source.endswith("/" + name) for source in sources):
                problems.append(f"{document.relative_to(root)}: no source ends with {name}")

    # "unit.routing_test" of a page: tests/unit/routing_test.* or a name in CMake.
    cmake = "\n".join(path.read_text() for path in code if path.name == "CMakeLists.txt" or path.suffix == ".cmake")
    for document in [*sorted((root / "docs").glob("*.md")), *sorted((root / "docs" / "semantics").glob("*.md"))]:
        for label, name in sorted(set(re.findall(r"(?<![\w./])(unit|golden|mpi|gpu|multigpu|tool|headers)\.([a-z]\w*[a-z0-9])(?![\w{])",
                                                 document.read_text()))):
            if not any(f"/{name}." in source for source in sources) and not re.search(rf"\b{name}\b", cmake):
                problems.append(f"{document.relative_to(root)}: no test {label}.{name}")

    # Files and functions that comments of the headers name.
    headers = sorted([*root.glob("include/**/*.hpp"), *root.glob("include/**/*.cuh")])
    cpp = [path for path in code if path.suffix in (".hpp", ".cuh", ".cpp", ".cu", ".h", ".c")]
    words = set(re.findall(r"\w+", "\n".join(re.sub(r"//[^\n]*", "", path.read_text()) for path in cpp)))
    for header in headers:
        problems += [f"{header.relative_to(root)}: a comment names {name}, which does not exist"
                     for name in unknown_names(header.read_text(), words, sources)]
    models = "\n".join(path.read_text() for path in (root / "include/moe/models").glob("*.hpp"))
    names = dict(re.findall(r"struct (\w+) : \w+ \{\n  static constexpr char const\* kName = \"([^\"]+)\"", models))
    problems += [f"models/preset_choice.hpp: {problem}, docs/log/hopper.md#presets" for problem in other_times(
        (root / "include/moe/models/preset_choice.hpp").read_text(), (root / "docs/log/hopper.md").read_text(), names)]

    problems += [f"layer/schedule_choice.hpp: {problem}, docs/log/layers.md" for problem in other_schedules(
        (root / "include/moe/layer/schedule_choice.hpp").read_text(), (root / "docs/log/layers.md").read_text())]

    # "docs/semantics/exchange.md §8.2, §9" of a comment, also over the end of a line, names sections that are there.
    pages = (root / "docs" / "semantics").glob("*.md")
    sections = {page.name: set(re.findall(r"^#+ ([0-9]+(?:\.[0-9]+)?)[. ]", page.read_text(), re.M)) for page in pages}
    found = 0
    for source in sources:
        if not source.endswith((".hpp", ".cuh", ".cpp", ".cu", ".py", ".txt", ".cmake")):
            continue
        text = re.sub(r"\n\s*(?://+|#)", " ", (root / source[1:]).read_text(errors="replace"))
        for page, numbers in re.findall(r"docs/semantics/([\w-]+\.md)((?:[\s,]+(?:and )?§[0-9]+(?:\.[0-9]+)?)*)", text):
            for number in re.findall(r"§([0-9]+(?:\.[0-9]+)?)", numbers):
                found += 1
                if number not in sections.get(page, set()):
                    problems.append(f"{source[1:]}: docs/semantics/{page} has no section {number}")
    if found == 0:
        problems.append("no comment names a section of docs/semantics")

    for problem in problems:
        print(f"FAILED: {problem}")
    print(f"{len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
