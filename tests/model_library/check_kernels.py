#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks with nm which kernels the CUDA library of a model holds and uses: its routing kernels are all compiled for the model's sizes, and
as many as are named, not one for each number of values of a lane; with --low-latency also that exchange's dispatch and combine, which the
exchange's own file asks for. Without it there are none."""
import argparse
import re
import subprocess
import sys


def symbols(nm: str, archive: str) -> list[tuple[str, str, str]]:
    """(member, kind, name) of each symbol."""
    listing = subprocess.run([nm, "-C", archive], capture_output=True, text=True, check=True).stdout
    found, member = [], ""
    for line in listing.splitlines():
        if line.endswith(".o:"):
            member = line[:-1]
        elif match := re.match(r"[0-9a-f ]*([A-Za-z]) (.+)$", line):
            found.append((member, match[1], match[2].partition(" [clone ")[0]))  # g++ splits functions into hot and cold parts
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nm", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--routing-kernels", type=int, required=True)
    parser.add_argument("--low-latency", action="store_true")
    parser.add_argument("archive")
    options = parser.parse_args()
    found, problems = symbols(options.nm, options.archive), []
    model = re.compile(rf"moe::models::{options.model}\b")

    routing = sorted({name.partition("(moe::routing::detail::RoutingCall")[0] for _, kind, name in found
                      if kind in "tTW" and re.match(r"void moe::routing::detail::routing_kernel<", name)})
    if len(routing) != options.routing_kernels:
        problems.append(f"{len(routing)} routing kernels, expected {options.routing_kernels}: {routing}")
    problems += [f"a routing kernel of run-time sizes: {name}" for name in routing if "FixedSizesConfig<" not in name
                 or not model.search(name)]
    if not any(kind == "U" and "RowRouter<" in name and "FixedSizesConfig<" in name and "::select<float>" in name
               for _, kind, name in found):
        problems.append("no file of the library asks for a router of fixed sizes")

    asks = [member for member, kind, name in found if kind == "U" and "low_latency_fixed<" in name and model.search(name)]
    for kernel in ("low_latency_dispatch_fixed<", "low_latency_combine_fixed<"):
        held = any(kind in "tTW" and f"void moe::detail::{kernel}" in name and model.search(name) for _, kind, name in found)
        if held != options.low_latency:
            problems.append(f"{kernel}…> is {'there' if held else 'missing'}")
    if bool(asks) != options.low_latency:
        problems.append(f"low_latency_fixed() is asked for by {asks or 'no file'}")
    for problem in problems:
        print(f"FAILED: {problem}")
    print(f"{options.archive}: {len(found)} symbols, {len(problems)} problems")
    return 1 if problems or not found else 0


if __name__ == "__main__":
    sys.exit(main())
