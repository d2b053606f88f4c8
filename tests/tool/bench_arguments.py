#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tests/tool/bench_arguments.py: a benchmark's program refuses what it does not know: exit code 2, and a line with what was written and
what is known. That needs no GPU and no start of MPI. bench/CMakeLists.txt runs it for each program that it builds.

    bench_arguments.py PROGRAM
"""
import pathlib
import subprocess
import sys

from expectations import expect, finish

GOOGLE = [  # programs that read Google Benchmark's options
    (["--bencmark_filter=x"], "--bencmark_filter=x"),
    (["x"], "x"),
]
# Needs no GPU, so its benchmarks are selected here too.
HOST = [*GOOGLE, (["--benchmark_filter=nosuch"], "no benchmark is selected")]
# Arguments, and parts of the line.
CASES = {
    "comm_exchange_bench": [(["--jsn", "file"], "--jsn", "--json"), (["--json"], "--json has no value")],
    "ep_layer_bench": [
        (["--shapes", "flsh"], "flsh", "flash, pro"),
        (["--shapes", "flash,prow"], "prow", "flash, pro"),
        (["--schemes", "fp4"], "fp4", "fp8, bf16"),
        (["--backends", "windows"], "windows", "low_latency"),
        (["--routing", "random"], "random", "softmax"),
        (["--tokens", "8,many"], "--tokens", "many"),
        (["--blocks", "few"], "--blocks", "few"),
        (["--turns", "0"], "--turns", "0"),
        (["--model", "pro"], "--model", "--shapes"),
        (["--json"], "--json has no value"),
    ],
    "eplb_bench": HOST,
    "eplb_move_bench": [(["--token", "8"], "--token ", "--tokens"), (["--tokens"], "--tokens"), (["--moves", "0"], "--moves", "0")],
    "exchange_bench": [
        (["--sections", "ll,hT"], "hT", "ceiling, ll, ht"),
        (["--sections", ""], "section", "ceiling"),
        (["--rank", "2"], "--rank ", "--ranks"),
        (["--blocks", "8,x"], "--blocks", "x"),
        (["--quick", "--json"], "--json has no value"),
    ],
    "fixed_sizes_bench": [(["router"], "router", "routing, exchange, token"), (["token", "tokens"], "tokens ", "token")],
    "forward_host_bench": [(["a.json", "b.json"], "b.json")],
    "hopper_layer_bench": [
        (["time", "bf16", "qwen4", "1"], "qwen4", "qwen3-30b-a3b"),
        (["time", "bf16", "", "1"], "shape", "all"),
        (["time", "fp8_block", "gpt-oss", "1"], "gpt-oss", "fp8_block"),  # no kernel for its sizes
        (["time", "fp8", "all", "1"], "fp8 ", "fp8_block"),
        (["time", "bf16", "all", "1,x"], "tokens", "x"),
        (["time", "bf16", "all"], "tokens"),
        (["columns", "fp8_row", "all", "1"], "fp8_row", "fp8_codes"),  # no blocks of columns
        (["check", "bf17"], "bf17", "bf16"),
        (["check"], "format", "bf16"),
        (["measure", "bf16"], "measure", "check, time"),
        ([], "mode", "check, time"),
    ],
    "hopper_w4a16_bench": [
        (["int4", "gpt-os120b", "1"], "gpt-os120b", "gpt-oss-120b"),
        (["int3", "all", "1"], "int3", "int4_zero"),
        (["int4", "all", "0"], "tokens", "0"),
        ([], "scheme", "mxfp4"),
    ],
    "host_dual_batch_bench": [
        (["--backend", "pplx"], "pplx", "all_to_all_v, low_latency"),
        (["--rows", "8,few"], "--rows", "few"),
        (["--row", "8"], "--row ", "--rows"),
        (["--topk"], "--topk has no value"),
    ],
    "host_layer_bench": HOST,
    "layer": GOOGLE,
    "load_bench": [(["--expert", "8"], "--expert"), (["--experts", "no"], "--experts", "no")],
    "routing_bench": GOOGLE,
    "runner_bench": [(["block"], "block")],
    "runner_dual_batch_bench": [
        (["--backends", "pplx"], "pplx", "high_throughput, low_latency"),
        (["--workers", "few"], "--workers", "few"),
        (["--worker", "0"], "--worker ", "--workers"),
    ],
    "runner_overlap_bench": [(["many"], "blocks", "many")],
    "runner_products_bench": [
        (["--shapes", "latent,qwen4"], "qwen4", "shared-qwen3-next"),
        (["--rows", "1,many"], "--rows", "many"),
        (["--row", "1"], "--row ", "--rows"),
        (["--json"], "--json has no value"),
    ],
    "tune": [(["-", "fp4"], "fp4", "int8_row")],
}
# What --help prints, of programs that have it.
HELP = {
    "ep_layer_bench": ["--backends", "completing", "--routing", "FOLDER/<shape>_<tokens>.bin", "--turns"],
    "runner_dual_batch_bench": ["--workers", "--experts"],
}


def main():
    program = pathlib.Path(sys.argv[1])
    for arguments, *parts in CASES[program.name]:  # a new program needs a line above
        run = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60)
        expect(run.returncode == 2 and all(p in run.stderr for p in parts), run)
    if program.name in HELP:
        run = subprocess.run([program, "--help"], capture_output=True, text=True, timeout=60)
        expect(run.returncode == 0 and all(option in run.stdout for option in HELP[program.name]), run)
    finish()


if __name__ == "__main__":
    main()
