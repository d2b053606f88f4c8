# SPDX-License-Identifier: Apache-2.0
# tests/tool/page_commands.py: the shell commands that a page shows.
import pathlib
import re


def commands(page: pathlib.Path) -> list[str]:
    """The lines of its indented code, continued lines joined, comments cut off."""
    lines, fenced, indented, before = [], False, False, ""
    for line in page.read_text().splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        indented = not fenced and line.startswith("    ") and (indented or not before.strip())
        if indented:
            lines.append(re.split(r"(?:^|\s)#(?:\s|$)", line.strip())[0].strip())
        before = line
    return [command for command in "\n".join(lines).replace("\\\n", " ").splitlines() if command]
