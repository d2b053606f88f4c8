#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks with nm that a program's object takes its layer from a model library: construction, run() and run_routed() are undefined in it;
with --block its runner: construction and run(). It holds no code of a kernel, an exchange, a router or a part of a block."""
import argparse
import re
import subprocess
import sys

NEEDED = [r"moe::detail::Layer<.*>::Layer\(", r"moe::detail::Layer<.*>::~Layer\(\)", r"moe::detail::Layer<.*>::run<float, moe::NoProbe>\(",
          r"moe::detail::Layer<.*>::run_routed<moe::NoProbe>\("]
NEEDED_OF_BLOCK = [r"moe::Runner<.*>::Runner\(", r"moe::Runner<.*>::~Runner\(\)", r"void moe::Runner<.*>::run<.*moe::NoProbe>\("]
# Symbols that only function bodies refer to or define. Names without parameters, because those name policies too.
FORBIDDEN = re.compile(r"::Kernel<.*>::(Kernel|~Kernel|apply|\w+)\(|Exchange<.*>::\w+\(|RowRouter<.*>::\w+|^dnnl_|route_row<|"
                       r"Layer<.*>::(run|run_routed|execute|route|validate|take_memory|agreed_max_tokens)[<(]|launch_\w+|"
                       r"Runner<.*>::(run|pass|leave|take_memory)[<(]|runner::\w+::\w+<.*>::Part<.*>::Part\(")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nm", required=True)
    parser.add_argument("--block", action="store_true", help="the program uses a block, not a layer alone")
    parser.add_argument("object")
    options = parser.parse_args()
    needed = NEEDED_OF_BLOCK if options.block else NEEDED
    listing = subprocess.run([options.nm, "-C", options.object], capture_output=True, text=True, check=True).stdout
    symbols = [match.groups() for match in re.finditer(r"^[0-9a-f ]*([A-Za-z]) (.+)$", listing, re.M)]
    problems = [f"not taken from the library: {name}" for name in needed
                if not any(kind == "U" and re.search(name, symbol) for kind, symbol in symbols)]
    for kind, symbol in symbols:
        wanted = kind == "U" and any(re.search(name, symbol) for name in needed)
        if not wanted and FORBIDDEN.search(symbol):
            problems.append(f"the program's object has: {kind} {symbol}")
    for problem in problems:
        print(f"FAILED: {problem}")
    print(f"{len(symbols)} symbols, {len(problems)} problems")
    return 1 if problems or not symbols else 0


if __name__ == "__main__":
    sys.exit(main())
