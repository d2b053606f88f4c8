# SPDX-License-Identifier: Apache-2.0
# tests/tool/layer_test.py: `moe layer` reproduces every MoE layer of the reference checkpoints on 1 to 4 ranks, and its report says so as
# text and as JSON.
import json
import pathlib
import re
import subprocess
import tempfile

from expectations import expect, finish
from tool import DATA, ENVIRONMENT, TOOL, in_parallel, moe, read, rows, same_output, same_routing, values

CHECKPOINTS = DATA / "checkpoints"
LAYERS = {"qwen3_moe_tiny": (0, 1), "deepseek_v3_tiny": (1, 2)}


def arguments(name, layer, output, *options):
    io = CHECKPOINTS / name / "moe_io.safetensors"
    return ["layer", "--checkpoint", CHECKPOINTS / name, "--layer", layer, "--input", io, "--tensor", f"layers.{layer}.moe_in",
            "--output", output, "--expected", f"{io}:layers.{layer}.moe_out_f32", *options]


def check_layer(folder, name, layer, ranks, options):
    output = folder / f"{name}_{layer}_{ranks}_{len(options)}.safetensors"
    run = moe(*arguments(name, layer, output, "--json", *options), ranks=ranks)
    if run.returncode != 0 or run.stderr:
        return f"exit code {run.returncode}: {run.stderr}"
    report = json.loads(run.stdout)
    want = {key: tensor for key, tensor in read(CHECKPOINTS / name / "moe_io.safetensors")[0].items() if key.startswith(f"layers.{layer}.")}
    expected = {part: want[f"layers.{layer}.{part}_f32"] for part in ("moe_out", "topk_ids", "topk_weights")}
    got, _ = read(output)
    if report["ranks"] != max(ranks, 1) or report["tokens"] != expected["moe_out"][1][0] or not report["error"] <= 1e-5:
        return f"report {report}"
    return (same_output(values(got["output"]), values(expected["moe_out"])) or
            same_routing(rows(got["topk_ids"]), rows(got["topk_weights"]), rows(expected["topk_ids"]), rows(expected["topk_weights"])))


def check_layers(folder):
    runs = [(name, layer, ranks, []) for name, layers in LAYERS.items() for layer in layers for ranks in (1, 2, 3, 4)]
    runs += [("deepseek_v3_tiny", 1, 3, ["--placement", "round_robin", "--backend", "allgather_reduce_scatter", "--experts", "reference"]),
             ("qwen3_moe_tiny", 1, 3, ["--placement", "round_robin", "--backend", "naive", "--deal", "random", "--seed", 3]),
             ("qwen3_moe_tiny", 0, 0, [])]  # without mpirun
    runs = [(name, layer, ranks, options) for name, layer, ranks, options in runs if (CHECKPOINTS / name).is_dir()]
    expect(len(runs) == 19, f"checkpoints are missing in {CHECKPOINTS}")
    results = in_parallel([(check_layer, folder, name, layer, ranks, options) for name, layer, ranks, options in runs])
    for run, problem in zip(runs, results):
        expect(problem is None, f"{run}: {problem}")


def check_report(folder):
    """The text says what the JSON object says."""
    output = folder / "report.safetensors"
    options = ["--backend", "naive", "--experts", "reference", "--placement", "round_robin"]
    text = moe(*arguments("deepseek_v3_tiny", 2, output, *options), ranks=3)
    object_ = moe(*arguments("deepseek_v3_tiny", 2, output, "--json", *options), ranks=3)
    expect(text.returncode == 0 and object_.returncode == 0, f"report: {text.stderr} {object_.stderr}")
    expect(object_.stdout.count("\n") == 1 and object_.stdout.endswith("}\n"), "--json is one object on one line")
    report = json.loads(object_.stdout)
    composition = report["composition"]
    expect(composition == {"router": "grouped_topk_sigmoid_top2_renormalize", "quantization": "none", "backend": "naive",
                           "experts": "reference", "device": "host"}, f"composition {composition}")
    for kind in ("routers", "quantizations", "backends", "experts"):  # one set of names
        named = composition[kind.removesuffix("s") if kind != "experts" else kind]
        listed = [line.split()[0] for line in moe("list", kind, ranks=0).stdout.splitlines()]
        expect(named in listed, f"moe list {kind} does not have {named}: {listed}")
    phases = {"route", "dispatch", "experts", "combine"}
    expect(phases <= set(report["seconds"]) <= phases | {"shared", "finish", "reduction"}
           and all(s >= 0 for s in report["seconds"].values()), f"seconds {report['seconds']}")
    expect(sum(report["load"]) == report["tokens"] * report["topk"], "every slot is counted once")
    expect(sum(report["load_per_rank"]) == sum(report["load"]) and len(report["load_per_rank"]) == 3, "load per rank")
    round_robin = [sum(report["load"][r::3]) for r in range(3)]
    expect(report["load_per_rank"] == round_robin, f"load per rank {report['load_per_rank']}, round robin gives {round_robin}")
    imbalance = max(report["load"]) * len(report["load"]) / sum(report["load"])
    expect(abs(report["load_imbalance"] - imbalance) < 1e-9, "imbalance is largest over mean")

    out = text.stdout
    for key, value in composition.items():
        expect(f"{key} {value}" in out, f"the text does not name {key} {value}:\n{out}")
    for fact in (f"hidden {report['hidden']}, intermediate {report['intermediate']}, {report['num_experts']} experts, top {report['topk']}",
                 "deepseek_v3, layer 2", f"largest / mean = {report['load_imbalance']:.2f}",
                 f"tokens        {report['tokens']} (per rank: {' '.join(map(str, report['tokens_per_rank']))})",
                 f"slots per rank: {' '.join(map(str, report['load_per_rank']))}", str(output)):
        expect(fact in out, f"the text does not say '{fact}':\n{out}")
    bars = re.findall(r"^ +(\d+) +(\d+)  ([█▏▎▍▌▋▊▉]*)$", out, re.M)
    expect([int(expert) for expert, _, _ in bars] == list(range(report["num_experts"])), f"one bar per expert:\n{out}")
    expect([int(load) for _, load, _ in bars] == report["load"], "the bars' numbers are the load")
    longest = max(bars, key=lambda bar: len(bar[2]))
    expect(int(longest[1]) == max(report["load"]) and len(longest[2]) == 40, "the longest bar is the most loaded expert's")
    for phase in ("route", "dispatch", "experts", "combine"):
        expect(re.search(phase + r" \d+\.\d+ ms", out), f"the text has no time of {phase}:\n{out}")
    shown = re.search(r"max \|output - expected\| / max \|expected\| = (\S+)", out)
    expect(shown and float(shown.group(1)) <= 1e-5, f"the text has no error:\n{out}")

    without = moe(*arguments("deepseek_v3_tiny", 2, output)[:-2])
    expect("error" not in without.stdout and without.returncode == 0, f"no --expected, no error: {without.stdout}")
    wrong = moe(*arguments("deepseek_v3_tiny", 2, output)[:-1],
                f"{CHECKPOINTS / 'deepseek_v3_tiny' / 'moe_io.safetensors'}:layers.1.moe_out_f32",
                "--json")
    expect(json.loads(wrong.stdout)["error"] > 0.1, "the error against another layer's output is large")


def check_dense_layer(folder):
    for ranks in (1, 3):
        run = moe(*arguments("deepseek_v3_tiny", 0, folder / "dense.safetensors"), ranks=ranks)
        lines = run.stderr.splitlines()
        expect(run.returncode == 1 and run.stdout == "" and len(lines) == 1, f"dense layer: {run}")
        expect(lines[0].startswith("moe: ") and "layer 0 of " in lines[0] and "is dense (first_k_dense_replace = 1)" in lines[0], lines[0])


def check_log(folder):
    """Each rank says what it was built of, as soon as it is built."""
    run = moe(*arguments("qwen3_moe_tiny", 0, folder / "log.safetensors", "--log", "info"), ranks=2)
    expect(run.returncode == 0, f"--log: {run}")
    for rank in (0, 1):
        for part in ("grid: tp 1, dp 2, pcp 1; experts over 2 ranks", "router softmax_topk_renormalize, backend all_to_all_v",
                     "quantization none, backend all_to_all_v, experts onednn, space host",
                     "memory besides the weights: runner and layer "):
            expect(re.search(rf"\[rank {rank}\] \[info\] .*{part}", run.stderr), f"the log of rank {rank} lacks '{part}':\n{run.stderr}")
    command = [TOOL, *map(str, arguments("qwen3_moe_tiny", 0, folder / "log.safetensors", "--log", "info", "--repeat", 1_000_000))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT) as long:
        line = long.stderr.readline()
        expect("[rank 0] [info] grid: " in line and long.poll() is None, f"first line of the log: {line}")
        long.kill()


with tempfile.TemporaryDirectory() as temporary:
    check_log(pathlib.Path(temporary))
    check_layers(pathlib.Path(temporary))
    check_report(pathlib.Path(temporary))
    check_dense_layer(pathlib.Path(temporary))
    expect(not list(pathlib.Path(temporary).glob("dense*")), "a refused layer left a file")
    expect(not list(pathlib.Path(temporary).glob("*.tmp*")), "a temporary file was left")
finish()
