# SPDX-License-Identifier: Apache-2.0
# tests/tool/compare_test.py: what bench/compare.py does without torch and without a GPU: floors, bounds on errors, spreads, the table, and
# arguments that are refused.
import json
import math
import pathlib
import subprocess
import sys
import tempfile

from expectations import expect, finish

BENCH = pathlib.Path(__file__).resolve().parents[2] / "bench"
sys.dont_write_bytecode = True
sys.path.insert(0, str(BENCH))
import compare_table as table  # noqa: E402

RATES = {"bf16": 600e12, "fp8": 1200e12, "int8": 1200e12}


def close(got, want):
    expect(math.isclose(got, want, rel_tol=1e-9), f"{got}, expected {want}")


def check_floors():
    bytes_ = {"bf16": 2.0, "fp8": 1 + 4 / 128**2, "mxfp4": 0.5 + 1 / 32, "int4": 0.5 + 2 / 128, "int4_32": 0.5 + 2 / 32}
    bytes_["nvfp4"] = 0.5 + 1 / 16
    for name, each in bytes_.items():
        close(table.DTYPES[name].matrix_bytes(256, 512), 256 * 512 * each)
    close(table.DTYPES["int8"].matrix_bytes(256, 512), 256 * 512 + 2 * 256)
    shape, mxfp4 = table.SHAPES["gpt-oss-120b"], table.DTYPES["mxfp4"]
    few = table.floors(shape, mxfp4, 1, 4, RATES, 4000e9)
    close(few["bf16"], 1e6 * (4 * 3 * 2880 * 2880 * (0.5 + 1 / 32) + 4 * 2880) / 4000e9)
    close(few["bf16"], few["fp8"])
    many = table.floors(shape, mxfp4, 16384, 128, RATES, 4000e9)
    close(many["bf16"], 1e6 * 6 * 16384 * 4 * 2880 * 2880 / 600e12)
    close(many["bf16"], 2 * many["fp8"])
    expect(table.DTYPES["fp8"].unfit(table.SHAPES["gpt-oss-120b"]) is not None, "2880 is not a multiple of 128")
    for dtype in table.DTYPES.values():
        for name in dtype.shapes:
            expect(name in table.SHAPES, name)
            expect(dtype.name == "fp8" or dtype.unfit(table.SHAPES[name]) is None, f"{dtype.name} {name}")


def check_bounds():
    for dtype, activations, tokens, ours, want in (
        ("bf16", "bf16", 64, True, 5e-3), ("bf16", "bf16", 64, False, 1e-2), ("fp8", "fp8", 64, True, 1e-2), ("fp8", "fp8", 1, True, 4e-2),
        ("fp8", "fp8", 64, False, 4e-2), ("int8", "int8", 64, True, 5e-3), ("int8", "int8", 64, False, 2e-2),
        ("int8", "bf16", 64, False, 1e-2), ("mxfp4", "bf16", 1, True, 5e-3), ("mxfp4", "bf16", 1, False, 1e-2),
        ("mxfp4", "fp8", 1, True, 1e-2), ("int4", "bf16", 9, False, 1e-2), ("int4_32", "bf16", 9, True, 5e-3),
        ("int4", "fp8", 9, True, 1e-2), ("nvfp4", "bf16", 9, False, 1e-2),
    ):  # fmt: skip
        got = table.tolerance(dtype, activations, tokens, ours)
        expect(got == want, f"{dtype} {activations} {tokens} {ours}: {got}, expected {want}")
    expect(table.tolerance("fp8", "fp8", 64, False, whole=False) == 2e-2, "products")


def check_line():
    times = [100.0] * 8 + [104.0, 110.0, 96.0]
    lowest, low, high, highest = table.spread(times)
    for got, want in ((lowest, -0.04), (low, 0.0), (high, 0.04), (highest, 0.10)):
        close(1 + got, 1 + want)
    point = {
        "tokens": 64,
        "floor_us": 80.0,
        "floors_us": {"this library": 80.0, "this library w4a8": 40.0, "vllm marlin": 80.0},
        "us": {"this library": 100.0, "this library w4a8": 60.0, "vllm marlin": 125.0},
        "single_us": {"this library": 101.0, "this library w4a8": 61.0, "vllm marlin": 126.0},
        "errors": {"this library": 2.5e-3},
        "spread": {"this library": (0, 0, 0, 0), "this library w4a8": (0, 0, 0, 0), "vllm marlin": (-0.1, -0.02, 0.03, 0.2)},
    }
    text = table.line("gpt-oss-120b", "mxfp4", point)
    for part in ("M64 ", "this library    100.0 x1.25 (single 101.0) error 2.5e-03 |", "w4a8     60.0 x1.50",
                 "vllm marlin    125.0 x1.56 ours/it 0.80", "spread -2.0..+3.0%"):  # fmt: skip
        expect(part in text, f"no {part!r} in {text!r}")
    expect(text.count("spread") == 1, text)
    del point["us"]["this library"]  # it was wrong: no ratio to it
    expect("ours/it" not in table.line("gpt-oss-120b", "mxfp4", point), "a ratio to a time that is not there")


def refused(said, *arguments):
    run = subprocess.run([sys.executable, "-B", str(BENCH / "compare.py"), *arguments], capture_output=True, text=True, check=False)
    expect(run.returncode == 2 and said in run.stderr and "Traceback" not in run.stderr, (arguments, run))


def check_arguments():
    refused("--dtype: no 'int3'; there are: bf16, fp8, int8, mxfp4, int4, int4_32, nvfp4", "--list", "--dtype", "int3")
    refused("--dtype: no 'bf16,fp8'", "--list", "--dtype", "bf16,fp8")
    refused("--tokens: 0 is out of range, 1 to 131072", "--list", "--tokens", "8,0")
    refused("--tokens: 131073 is out of range", "--list", "--tokens", "131073")
    refused("--tokens: '8,x' is not a list of whole numbers", "--list", "--tokens", "8,x")
    refused("--turns: 2 is out of range, 3 to 1000", "--list", "--turns", "2")
    refused("--shapes: no 'mixtral'; there are: mixtral-8x7b", "--list", "--shapes", "mixtral")
    refused("LIBRARY is missing")
    with tempfile.TemporaryDirectory() as folder:
        refused("is not there; the target moe_hopper_capi builds it", f"{folder}/no.so")
        library = pathlib.Path(folder) / "empty.so"
        library.touch()
        refused("--json: the folder", str(library), "--json", f"{folder}/none/out.json")
        (pathlib.Path(folder) / "torch.py").write_text("raise ImportError('No module named torch')")
        run = subprocess.run([sys.executable, "-B", str(BENCH / "compare.py"), str(library)], capture_output=True, text=True, check=False,
                             env={"PYTHONPATH": folder})  # fmt: skip
        expect(run.returncode == 2 and "compare.py: No module named torch; it needs torch 2.11" in run.stderr, run)


def check_plot():
    """floor_plot.py draws a point as compare.py writes it."""
    point = {"shape": "kimi-k2", "tokens": 8, "floor_us": 10.0, "us": {"this library": 12.0, "vllm marlin": 15.0}}
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder)
        (path / "in.json").write_text(json.dumps({"device": "a device", "dtype": "int4", "points": [point]}))
        run = subprocess.run([sys.executable, str(BENCH / "floor_plot.py"), str(path / "out.svg"), str(path / "in.json")], check=False)
        expect(run.returncode == 0 and "vllm marlin" in (path / "out.svg").read_text(), run)


check_floors()
check_bounds()
check_line()
check_arguments()
check_plot()
finish()
