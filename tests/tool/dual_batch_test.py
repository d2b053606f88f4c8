# SPDX-License-Identifier: Apache-2.0
# tests/tool/dual_batch_test.py: `moe block --dual-batch` and `--shared-overlap` give the bits of whole batches and of shared experts that
# run first, over every backend whose exchange has halves, whole and in chunks; what cannot be split is refused with the rule's sentence.
import pathlib
import sys
import tempfile

from tool import DATA, block_refusals, in_parallel, moe, read, report_runs, run_block, write

FAMILIES = ("qwen2_moe", "deepseek_v3", "gpt_oss", "longcat", "nemotron_h_latent")
BACKENDS = ("all_to_all_v", "low_latency", "high_throughput", "pplx")
LEAST_ROWS = 1024  # of every rank, from which auto splits
SPLIT = f"auto: batches are split where every rank has at least {LEAST_ROWS} rows"
NEVER = f"auto: batches are never split: that takes {LEAST_ROWS} rows on every rank, and the most of any rank is"


def cases(files):
    """Every backend on grids of 1, 2 and 4 ranks with one of the files in turn, whole and in chunks of 2 rows."""
    grids = (1, []), (2, []), (2, ["--tp", 2]), (4, ["--tp", 2, "--sequence-parallel"]), (4, ["--deal", "random", "--seed", 3])
    number = 0
    for backend in BACKENDS:
        for ranks, grid in grids:
            if backend == "pplx" and "--sequence-parallel" in grid:
                continue  # it expects the same rows on all ranks of a TP group
            chunk = ["--chunk", 2] if number % 2 else []
            yield files[number % len(files)], ranks, ["--backend", backend, "--experts", "reference", *grid, *chunk]
            number += 1


def modes(mode, number):
    """The value of --dual-batch; every other time none, where that means the same."""
    return [] if mode == "on" and number % 2 else [mode]


def check(folder, name, file, ranks, options):
    reports = {}
    outputs = {}
    for mode in ("off", "auto", "on", "first"):
        how = ["--shared-overlap", "off"] if mode == "first" else ["--dual-batch", *modes(mode, name)]
        problem, reports[mode], outputs[mode] = run_block(folder, f"{name}{mode}", file, ranks, [*options, *how])
        if problem:
            return f"{mode}: {problem}"
        if outputs[mode] != outputs["off"]:
            return f"{mode}: the output or the routing is not that of whole batches"
        if not reports[mode]["error"] <= 1e-5:
            return f"{mode}: error {reports[mode]['error']}"
    off, auto, on = (reports[mode] for mode in ("off", "auto", "on"))
    if off["passes_in_halves"] != 0 or on["passes_in_halves"] != on["passes"] or on["passes"] != off["passes"]:
        return f"{on['passes_in_halves']} of {on['passes']} passes in halves, without halves {off['passes_in_halves']} of {off['passes']}"
    parts = on["grid"]["tp"] if on["grid"]["sequence_parallel"] else 1
    rows, most = min(on["tokens_per_rank"]) // parts, max(1, -(-max(on["tokens_per_rank"]) // parts))
    most = min(most, int(options[options.index("--chunk") + 1])) if "--chunk" in options else most
    if auto["passes_in_halves"] != (auto["passes"] if rows >= LEAST_ROWS and "--chunk" not in options else 0):
        return f"auto: {auto['passes_in_halves']} passes in halves with {rows} rows"
    said = [off["dual_batch"], on["dual_batch"], auto["dual_batch"].split(": from there")[0]]
    if said != ["off", "on: every batch is split", SPLIT if most >= LEAST_ROWS else f"{NEVER} {most}"]:
        return f"the reports give the reasons {said}"
    return None


def long_block(folder, file):
    """The block file with its rows again and again, so that each of two ranks has LEAST_ROWS."""
    tensors, metadata = read(file)
    rows = tensors["hidden"][1][0]
    copies = -(-2 * LEAST_ROWS // rows)
    for name in ("hidden", "expected"):
        dtype, (_, width), data = tensors[name]
        tensors[name] = dtype, [copies * rows, width], copies * data
    write(folder / "long.safetensors", tensors, metadata)
    return folder / "long.safetensors"


def reasons(folder, file):
    """Problems of what the report as text and the log say of the choice."""
    no_halves = "auto: batches are never split: allgather_reduce_scatter cannot send and wait apart"
    always = "on: every batch is split"
    short = f"{NEVER} {-(-read(file)[0]['hidden'][1][0] // 2)}"
    for mode, backend, words, rows in (
        ("auto", "allgather_reduce_scatter", no_halves, file), ("auto", "all_to_all_v", short, file),
        ("auto", "all_to_all_v", f"{SPLIT}: from there", long_block(folder, file)), ("on", "all_to_all_v", always, file),
        ("", "all_to_all_v", always, file), ("off", "all_to_all_v", "off", file)):
        # Without a mode: before an option here, before the file below, which is not one.
        run = moe("block", "--dual-batch", *mode.split(), "--log", "info", "--output", folder / f"{mode}_{backend}.safetensors",
                  "--backend", backend, "--experts", "reference", rows, ranks=2)
        lines = [line for line in run.stdout.splitlines() if line.startswith("dual batch ")]
        if run.returncode or f"--dual-batch {words}" not in run.stderr or lines[1:] or (mode == "off") != (not lines):
            yield f"--dual-batch {mode} over {backend}: {run}"
        if lines and f" passes in two halves; {words}" not in lines[0]:
            yield f"--dual-batch {mode} over {backend}: {lines}"
        # The block's own line, where it can be split, says the same.
        said = {"never split" in line for line in run.stderr.splitlines() if "batches are" in line}
        if len(said) > 1 and mode != "off":
            yield f"--dual-batch {mode} over {backend}: the log says that batches are split and that they are not: {run.stderr}"
    run = moe("block", "--output", folder / "bare.safetensors", "--backend", "all_to_all_v", "--log", "info", "--dual-batch", file, ranks=2)
    if run.returncode or f"--dual-batch {always}" not in run.stderr:
        yield f"--dual-batch without a mode before the file: {run}"
    shown = moe("layer", "--help", ranks=0).stdout.partition("--dual-batch")[2].partition("--shared-overlap")[0]
    if any(f" {mode}: " not in shown for mode in ("on", "auto", "off")) or "Without a mode: on" not in shown or "=off" not in shown:
        yield f"the help of --dual-batch does not say what each mode is: {shown}"


def refusals(folder, file):
    dtype, (rows, hidden), data = read(file)[0]["hidden"]
    row = folder / "row.safetensors"
    write(row, {"hidden": (dtype, [1, hidden], data[:len(data) // rows])})
    no_halves = "dual batch over a backend that cannot send and wait apart"
    cases = [
        (2, ["--dual-batch", "on", "--backend", "allgather_reduce_scatter"], "E_CONFIG", no_halves, "all_to_all_v"),
        (1, ["--dual-batch", "on"], "E_CONFIG", no_halves),
        (2, ["--dual-batch", "on", "--chunk", 1], "E_CONFIG", "--dual-batch on: a pass of --chunk 1 row has no two halves. Fix: --chunk 2"),
        (2, ["--dual-batch", "on", "--input", row], "E_CONFIG", "--dual-batch on: no rank has more than 1 row"),
        (1, ["--dual-batch", "on", "--device", "cuda"], "E_CONFIG", no_halves),
        (1, ["--shared-overlap", "on"], "--shared-overlap", "on"),
        (1, ["--dual-batch", "maybe"], "--dual-batch", "maybe"),
    ]
    return block_refusals(file, cases)


def main():
    found = sorted((DATA / "moe_blocks").glob("*.safetensors"))
    files = [file for family in FAMILIES for file in [f for f in found if f.name.startswith(family + "_")][:1]]
    assert len(files) >= 3, f"{len(files)} block files of {FAMILIES} in {DATA}"
    runs = list(cases(files))
    with tempfile.TemporaryDirectory() as name:
        results = in_parallel([(check, pathlib.Path(name), i, *run) for i, run in enumerate(runs)])
        said = list(reasons(pathlib.Path(name), files[0]))
        refused = refusals(pathlib.Path(name), files[0])
    return report_runs(runs, results, refused + said, files)


sys.exit(main())
