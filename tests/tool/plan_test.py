# SPDX-License-Identifier: Apache-2.0
# tests/tool/plan_test.py: `moe plan` gives the reference placements, draws them, and refuses bad input with one line.
import json
import os
import pathlib
import subprocess
import sys
import tempfile

TOOL = os.environ["MOE_TOOL"]
DATA = pathlib.Path(os.environ.get("MOE_GOLDEN_DIR") or os.environ["MOE_TEST_DATA"]) / "eplb"


def plan(*arguments):
    return subprocess.run([TOOL, "plan", *map(str, arguments)], capture_output=True, text=True, timeout=60)


def reference_arguments(path, case):
    replicas = case["num_replicas"] - case["num_logical_experts"]
    return ["--load", path, "--replicas", replicas, "--groups", case["num_groups"], "--nodes", case["num_nodes"], "--ranks",
            case["num_gpus"]]


def check_reference_files():
    files = sorted(DATA.glob("*.json"))
    assert files, f"no files in {DATA}"
    for path in files:
        case = json.loads(path.read_text())
        expected = case.get("stable_sort", case)
        run = plan(*reference_arguments(path, case), "--json")
        assert run.returncode == 0, run.stderr
        got = json.loads(run.stdout)
        for field in ("physical_to_logical", "logical_to_physical", "logical_count"):
            assert got[field] == expected.get(field, case[field]), f"{path.name}: {field}"
        assert got["policy"] == case["policy"], path.name
        assert got["balancedness_after"] >= got["balancedness_before"] - 1e-12, path.name
        assert got["balancedness_after"] == got["after"]["balancedness"]


def check_picture():
    path = DATA / "readme_example.json"
    run = plan(*reference_arguments(path, json.loads(path.read_text())))
    assert run.returncode == 0, run.stderr
    assert "12 experts + 4 replicas = 16 expert slots on 8 ranks" in run.stdout
    assert "layer 0: balancedness 0.480 -> 0.828" in run.stdout
    rows = [line for line in run.stdout.splitlines() if line.startswith("     0  #")]
    assert len(rows) == 2 and rows[0].endswith("121.5  5/2 6"), rows
    one = plan(*reference_arguments(path, json.loads(path.read_text())), "--layer", 1)
    assert "layer 1:" in one.stdout and "layer 0:" not in one.stdout
    both = json.loads(plan(*reference_arguments(path, json.loads(path.read_text())), "--json").stdout)
    one = json.loads(plan(*reference_arguments(path, json.loads(path.read_text())), "--layer", 1, "--json").stdout)
    assert one["layer"] == 1 and "layer" not in both
    for field in ("physical_to_logical", "logical_to_physical", "logical_count", "moved_slots", "expert_transfers", "transfer_rounds"):
        assert one[field] == both[field][1:2], field
    kept = plan(*reference_arguments(path, json.loads(path.read_text())), "--keep-slots", "--json")
    moved = json.loads(plan(*reference_arguments(path, json.loads(path.read_text())), "--json").stdout)
    assert sum(json.loads(kept.stdout)["moved_slots"]) <= sum(moved["moved_slots"])
    assert json.loads(kept.stdout)["balancedness_after"] == moved["balancedness_after"]


def check_what_is_ignored():
    """Groups and nodes that do not divide are left out of account, and the plan says so."""
    common = ["--load", DATA / "readme_example.json", "--replicas", 4, "--ranks", 8]  # 12 experts
    for groups, nodes, note in (
        (3, 2, "--nodes 2 is ignored: --groups 3 is not a multiple of it; the plan is for 1 node, policy global"),
        (1, 2, "--nodes 2 is ignored: --groups 1 is not a multiple of it; the plan is for 1 node, policy global"),
        (4, 3, "--nodes 3 is ignored: --ranks 8 is not a multiple of it; the plan is for 1 node"),
        (5, 1, "--groups 5 is ignored: the number of experts, 12, is not a multiple of it"),
        (5, 2,
         "--groups 5 is ignored: the number of experts, 12, is not a multiple of it; --nodes 2 is ignored: 1 group is not a multiple of "
         "it; the plan is for 1 node, policy global"),
        (4, 2, None), (4, 1, None), (1, 1, None),
    ):
        text = plan(*common, "--groups", groups, "--nodes", nodes)
        assert text.returncode == 0 and [line for line in text.stdout.splitlines() if line.startswith("note: ")] == ([f"note: {note}"]
                                                                                                                     if note else []), text
        got = json.loads(plan(*common, "--groups", groups, "--nodes", nodes, "--json").stdout)
        assert got.get("note") == note and got["num_nodes"] == (1 if note else nodes), got


def check_errors():
    example = DATA / "readme_example.json"
    with tempfile.TemporaryDirectory() as folder:
        bad = pathlib.Path(folder) / "bad.json"

        def refused(code, part, *arguments):
            run = plan(*arguments)
            assert run.returncode == code, (arguments, run.returncode, run.stderr)
            assert run.stdout == "" and run.stderr.count("\n") == 1 and part in run.stderr, (part, run.stderr)

        refused(1, f"cannot read '{bad}': No such file or directory", "--load", bad, "--ranks", 2)
        refused(1, f"cannot read '{folder}': it is a directory", "--load", folder, "--ranks", 2)
        refused(1, "cannot read '/proc/self/mem': Input/output error", "--load", "/proc/self/mem", "--ranks", 2)
        for contents, part in (
            ("[[1, -2]]", "load of expert 1 in layer 0 must be finite and at least 0, is -2"),
            ("[[1, 2], [1, 1e308]]", "load of expert 1 in layer 1 must be at most 8.98847e+307 (float64, 2 experts), is 1e+308"),
            ("[[1, 2], [3]]", "layer 1 has 1 entries, layer 0 has 2"),
            ('{"weight": [[1, "two"]]}', "layer 0, entry 1 must be a number"),
            ('{"weight": ', "is not valid JSON at byte 12"),
            ("[[1, 1e400]]", "is not valid JSON: number overflow parsing '1e400'"),
            ("{}", "holds no load"),
            ("[" * 200000 + "]" * 200000, "nests deeper than 64 levels"),
        ):
            bad.write_text(contents)
            refused(1, part, "--load", bad, "--ranks", 1)
        refused(1, "nearest valid --replicas: 3", "--load", example, "--ranks", 5)
        refused(1, "--layer 99 is out of range [0, 2)", "--load", example, "--ranks", 4, "--layer", 99)
        refused(1, 'has no models, so none is "other"', "--load", example, "--ranks", 4, "--model", "other")
        refused(2, "--ranks", "--load", example)
        refused(2, "--load", "--ranks", 4)
        refused(2, "--ranks", "--load", example, "--ranks", 0)
        refused(2, "0 to 2147483647", "--load", example, "--ranks", 4, "--layer", -1)
        refused(2, "--replicas", "--load", example, "--ranks", 4, "--replicas", -1)
        refused(2, "--sideways", "--load", example, "--ranks", 4, "--sideways")


def check_lost_report():
    """Standard output that cannot be written, as on a full disk."""
    with open(TOOL, "rb") as only_read:
        for arguments in (["plan", "--load", DATA / "readme_example.json", "--replicas", 4, "--ranks", 8], ["list", "models"], ["--help"],
                          ["--version"]):
            run = subprocess.run([TOOL, *map(str, arguments)], stdout=only_read, stderr=subprocess.PIPE, text=True, timeout=60)
            assert run.returncode == 1 and run.stderr.startswith("moe: standard output cannot be written"), (arguments, run)
            assert run.stderr.count("\n") == 1, run.stderr
    with open("/dev/full", "w") as full:
        for arguments in (["plan", "--load", DATA / "readme_example.json", "--ranks", 4], ["list", "models"], ["--version"]):
            run = subprocess.run([TOOL, *map(str, arguments)], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
            assert run.returncode == 1, (arguments, run)
            assert run.stderr == "moe: standard output cannot be written: No space left on device\n", run.stderr


check_reference_files()
check_picture()
check_what_is_ignored()
check_errors()
check_lost_report()
sys.exit(0)
