#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# tests/tool/support_table_test.py: docs/support.md equals the output of `moe list --json`.
# `MOE_TOOL=build/host/bin/moe support_table_test.py --write` writes the page.
import difflib
import json
import os
import pathlib
import subprocess
import sys
import textwrap

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "support.md"
SPACES = {"host": "Host", "cuda": "CUDA"}
KINDS = {
    "router": ("Routers", "`moe::routing`", "moe::routing::", "moe/routing/"),
    "quantization": ("Quantisations", "`moe::quantization`", "moe::quantization::", "moe/quantization/"),
    "backend": ("Backends", "`moe::backends`", "moe::backends::", "moe/backends/"),
    "experts": ("Experts", "`moe::experts`", "moe::experts::", "moe/experts/"),
}

COMMUNICATORS = """\
Communicators and windows are types of `moe::comm`, in `moe/comm/`: `Self<>` in `self.hpp`, `Mpi` in `mpi.hpp`, `MpiShared` in
`mpi_shared.hpp`, `Nccl` in `nccl.hpp`, `NcclSymmetric` in `nccl_symmetric.hpp` (with its kernel in `nccl_symmetric.cuh`, which at least one
translation unit includes). A window's layer is constructed with the communicator under it: `Mpi` for `MpiShared`, `Nccl` for
`NcclSymmetric`. `space::host` and `space::cuda` are types of `moe`.
""".split("\n")

HEAD = """# What the library supports

`tests/tool/support_table_test.py --write` generates this page from `moe list policies --json` and `moe list compositions --json`. A test
fails where the page differs. [choose.md](choose.md) says which composition to take.

The tables show what the rules allow for a layer of run-time dimensions, in the element types that the backend carries and the experts
compute with. Every router goes with every composition, with two conditions: `llama4` weights the input, which a batched backend
(`low_latency`, `pplx`) does for one expert a token only; and experts that route inside (`monolithic_*`) take no `external` one. `moe list
compositions` says which of these compositions one build of the tool contains: `yes`, `not in this program:` with what builds it, or
`no:` with the rule.

Some schemes have a type and no name here: 8-bit codes and groups of 16 and 256 of `quantization::WNa16`, groups of 64 of
`quantization::W4A8`, `quantization::Int8Group`, and the schemes whose scales of rows come from a checkpoint (`Fp8PerTensorStatic`,
`Int8PerTensorStatic`).
"""


def listed(what):
    run = subprocess.run([os.environ["MOE_TOOL"], "list", what, "--json"], capture_output=True, text=True, timeout=120, check=True)
    return json.loads(run.stdout)


def table(head, rows):
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)] + ["| " + " | ".join(row) + " |" for row in rows] + [""]


def unique(values):
    return list(dict.fromkeys(values))


def policies(rows):
    out = ["## Policies by name", ""]
    for kind, (title, where, prefix, folder) in KINDS.items():
        chosen = [row for row in rows if row["kind"] == kind]
        spaces = any(row["space"] != "both" for row in chosen)
        out += [f"### {title}", "", f"The types are in {where}, the headers in `{folder}`." +
                ("" if spaces else " All are for both spaces."), ""]
        if kind == "backend":
            out += COMMUNICATORS
        lines = []
        for row in chosen:
            name = row["type"].replace(" >", ">")
            name = name.replace(prefix, "") if kind == "router" else name.removeprefix(prefix)
            name = name.replace("<moe::comm::", "<").replace("<moe::", "<") if kind == "backend" else name
            line = [f"`{row['name']}`", f"`{name}`",
                    " and ".join(f"`{name.removeprefix(folder)}`" for name in row["include"].split(" and ")
                                 if not name.startswith("moe/comm/"))]
            lines.append(line + [SPACES[row["space"]], f"`{row['links']}`"] if spaces else line)
        out += table(["name", "C++ type", "include"] + (["space", "links"] if spaces else []), lines)
        if kind == "router":
            out += ["A layer in the CUDA space also needs `moe/routing/device/route.cuh`. The field `router` of a layer's parameters is "
                    "the type's `Params`,", "which its header describes.", ""]
    return out


def compositions(policy_rows, rows):
    schemes = [row["name"] for row in policy_rows if row["kind"] == "quantization"]
    allowed = {}
    for row in rows:
        if row["answer"] != "no":
            allowed.setdefault((row["space"], row["backend"], row["experts"]), []).append(row["quantization"])
    sets = unique(tuple(found) for found in allowed.values())
    sets.sort(key=lambda found: (-len(found), schemes.index(found[0])))
    letters = {found: "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[i] for i, found in enumerate(sets)}
    out = ["## Backends and experts", "", "A letter names the quantisations that the pair has; – means that the rules forbid the pair.", ""]
    for found, letter in letters.items():
        every = len(found) == len(schemes)
        line = f"* **{letter}**: " + (f"all {len(schemes)} quantisations" if every else ", ".join(f"`{name}`" for name in found))
        out += textwrap.wrap(line, 132, subsequent_indent="  ")
    out.append("")
    for space, title in SPACES.items():
        backends = unique(row["name"] for row in policy_rows if row["kind"] == "backend" and row["space"] == space)
        experts = unique(row["name"] for row in policy_rows if row["kind"] == "experts" and row["space"] == space)
        out += [f"### {title} space", ""]
        inside = [name for name in experts if name.startswith("monolithic_")]  # a table of their own: lines stay short
        for part in ([name for name in experts if name not in inside], inside):
            out += table([""] + [f"`{name}`" for name in part],
                         [[f"`{backend}`"] + [letters.get(tuple(allowed.get((space, backend, name), ())), "–") for name in part]
                          for backend in backends])
    return out


def schemes(policy_rows, rows):
    names = [row["name"] for row in policy_rows if row["kind"] == "quantization"]
    experts = unique(row["name"] for row in policy_rows if row["kind"] == "experts" and not row["name"].startswith("monolithic_"))
    backends = {(name, scheme): len([row for row in rows if row["experts"] == name and row["quantization"] == scheme
                                     and row["answer"] != "no"])
                for name in experts for scheme in names}
    out = ["## Quantisations and experts", "",
           "The number of backends with which the experts compute the scheme. `monolithic_*` compute what the experts inside do.", ""]
    for space, title in (("host", "In the host space:"), ("cuda", "In the CUDA space:")):
        there = unique(row["name"] for row in policy_rows
                       if row["kind"] == "experts" and row["space"] == space and not row["name"].startswith("monolithic_"))
        out += [title, ""]
        out += table(["scheme", *[f"`{name}`" for name in there]],
                     [[f"`{scheme}`", *[str(backends[name, scheme] or "–") for name in there]] for scheme in names])
    described = [row for row in policy_rows if row["kind"] == "quantization"]
    architectures = sorted(described[0]["architectures"], key=lambda name: int(name.removeprefix("sm_")))

    def cell(support):
        return support["support"] + ("" if support["experts"] == "cuda_reference" else f" (`{support['experts']}`)")

    out += ["### On each architecture", "",
            "The best support among the experts of the CUDA space, with the first experts of the registry that have it, of those that",
            "emulate the last; [choose.md](choose.md) says which experts are fastest. Tested on sm_90 only.", "",
            "* **native**: the tensor cores take what is stored",
            "* **converted**: weights become bf16 or e4m3 in registers on the way to the tensor cores",
            "* **emulated**: the rounding of the scheme, then products of what the codes stand for: of bf16 on the tensor cores where",
            "  experts are named, else of float32 without them in `cuda_reference`",
            ""]
    return out + table(["scheme", *architectures],
                       [[f"`{row['name']}`", *[cell(row["architectures"][name]) for name in architectures]] for row in described])


policy_table = listed("policies")
triples = listed("compositions")
page = "\n".join([HEAD, *policies(policy_table), *compositions(policy_table, triples), *schemes(policy_table, triples)])
page = page.rstrip("\n") + "\n"
too_long = [line for line in page.splitlines() if len(line) > 140]
if "--write" in sys.argv[1:]:
    PAGE.write_text(page)
difference = list(difflib.unified_diff(PAGE.read_text().splitlines(), page.splitlines(), "docs/support.md", "moe list", lineterm="", n=1))
print("\n".join(difference + [f"longer than 140 columns: {line}" for line in too_long]))
if difference:
    print("FAILED: docs/support.md differs from what the tool lists; MOE_TOOL=build/host/bin/moe tests/tool/support_table_test.py --write")
sys.exit(1 if difference or too_long else 0)
