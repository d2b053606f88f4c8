# SPDX-License-Identifier: Apache-2.0
# tests/tool/nvtx_test.py: `moe block --nvtx` makes ranges that a profiler sees: NVTX loads a library in its place (nvtx_listener.cpp),
# which writes them to a file. A tool without CUDA refuses the option.
import os
import pathlib
import sys
import tempfile

from expectations import expect, finish
from tool import DATA, moe

LISTENER = os.environ.get("MOE_NVTX_LISTENER")  # of a tool with CUDA
STAGES = ["route", "shared", "route", "dispatch", "experts", "combine", "finish"]  # of a forward on one rank; the gate, then the router


def ranges(folder, name, *options):
    """The run, and the lines of the listener."""
    log = folder / f"{name}.log"
    block = next((DATA / "moe_blocks").glob("qwen2_moe_*.safetensors"))
    run = moe("block", block, "--output", folder / f"{name}.safetensors", "--experts", "reference", "--repeat", 2, *options,
              environment={"NVTX_INJECTION64_PATH": LISTENER or "", "MOE_NVTX_LOG": str(log)})
    return run, log.read_text().splitlines() if log.exists() else []


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        run, lines = ranges(folder, "with", "--nvtx")
        if LISTENER is None:
            expect(run.returncode == 1 and "E_UNSUPPORTED: --nvtx: this program was built without CUDA" in run.stderr, f"refused: {run}")
            return finish()
        expect(run.returncode == 0, f"--nvtx: {run}")
        ours = [line for line in lines if line.split()[1:2] == ["moe"]]
        expect(ours[:1] == ["domain moe"], f"the domain: {ours[:1]}")
        forwards = 3  # --repeat, and one before
        begun = [line.removeprefix("begin moe ") for line in ours[1::2]]
        expect(ours[2::2] == ["end moe"] * len(begun), f"each range ends before the next begins: {ours}")
        expect(begun == forwards * STAGES, f"one range of each stage in each of {forwards} forwards: {begun}")
        run, lines = ranges(folder, "without")
        expect(run.returncode == 0 and not any(" moe" in line for line in lines), f"without --nvtx: {run} {lines}")
    return finish()


sys.exit(main())
