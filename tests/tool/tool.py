# SPDX-License-Identifier: Apache-2.0
# tests/tool/tool.py: what the tests of the command-line tool share: running it on some ranks, reading and writing safetensors.
import array
import concurrent.futures
import json
import os
import pathlib
import struct
import subprocess
import tempfile

TOOL = os.environ["MOE_TOOL"]
MPIEXEC = os.environ["MOE_MPIEXEC"]
DATA = pathlib.Path(os.environ.get("MOE_GOLDEN_DIR") or os.environ["MOE_TEST_DATA"])
CODES = {"F32": "f", "F64": "d", "I64": "q", "I32": "i", "I8": "b", "U8": "B"}
NO_GPU = "moe: E_UNSUPPORTED: --device cuda: this machine has no usable GPU; use --device host"
NO_NCCL = ("not in this program: it was built without NCCL; install NCCL (nccl.h and libnccl, where the CUDA toolkit is) and configure "
           "again with MOE_NCCL=ON")
NO_CUDA = "not in this program: it was built without CUDA; build the cuda preset (MOE_CUDA=ON)"
NOT_HOPPER = "moe: E_UNSUPPORTED: hopper experts: they are built for compute capability 9.0 (sm_90a), device "  # and which it is
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
# Where there is no GPU: see empty_cublas.py.
WITHOUT_CUBLAS = dict(ENVIRONMENT)
if os.environ.get("MOE_EMPTY_CUBLAS") and not any(pathlib.Path("/dev").glob("nvidia*")):
    folders = filter(None, (os.environ["MOE_EMPTY_CUBLAS"], os.environ.get("LD_LIBRARY_PATH")))
    WITHOUT_CUBLAS["LD_LIBRARY_PATH"] = ":".join(folders)


def moe(*arguments, ranks=1, timeout=120, environment=None):
    """Runs the tool; ranks = 0: without mpirun. environment: variables besides the usual ones."""
    command = [TOOL, *map(str, arguments)]
    if ranks:
        command = [MPIEXEC, "--quiet", "--oversubscribe", "--bind-to", "none", "-n", str(ranks), *command]
    # Open MPI's folder for the run: in the common one, an mpirun that ends can remove what another is about to use.
    with tempfile.TemporaryDirectory(prefix="moe-ompi-") as folder:
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False,
                              env={**WITHOUT_CUBLAS, **(environment or {}), "OMPI_MCA_orte_tmpdir_base": folder})


def in_parallel(jobs, at_a_time=2):
    """Calls each (function, arguments...) and returns the results in order. A start of mpirun mostly waits, so several run at a time."""
    with concurrent.futures.ThreadPoolExecutor(at_a_time) as pool:
        return [f.result() for f in [pool.submit(job[0], *job[1:]) for job in jobs]]


def run_block(folder, name, file, ranks, options):
    """`moe block` on a block file, compared with its own output: (problem, report, tensors written)."""
    output = folder / f"{name}.safetensors"
    run = moe("block", file, "--output", output, "--expected", f"{file}:expected", "--json", *options, ranks=ranks)
    if run.returncode != 0 or run.stderr:
        return f"exit code {run.returncode}: {run.stderr}", None, None
    return None, json.loads(run.stdout), read(output)[0]


def block_refusals(file, cases):
    """The problems of `moe block` calls that must end with one line: cases of (ranks, options, parts of the line...)."""
    def refused(ranks, options, *parts):
        run = moe("block", file, "--output", "refused.safetensors", *options, ranks=ranks)
        lines = run.stderr.splitlines()
        if run.returncode not in (1, 2) or len(lines) != 1 or any(part not in lines[0] for part in parts):
            return f"{options} on {ranks} ranks: exit code {run.returncode}: {run.stderr}, expected {parts}"
        return None

    return [problem for problem in in_parallel([(refused, *case) for case in cases]) if problem]


def report_runs(runs, results, refusals, files):
    """Prints the problems of runs (file, ranks, options) and of refusals; the exit code."""
    failures = [f"{file.name} on {ranks} ranks {options}: {problem}" for (file, ranks, options), problem in zip(runs, results) if problem]
    failures += refusals
    for failure in failures:
        print(f"FAILED: {failure}")
    print(f"{len(runs)} runs over {len(files)} files, {len(failures)} failed")
    return 1 if failures else 0


def layer_problem(folder, ranks, bound, scheme="none"):
    """Runs `moe layer` over layer 1 of a checkpoint on the rows in FOLDER_io.safetensors; nothing if the error is within the bound."""
    io = folder.parent / f"{folder.name}_io.safetensors"
    done = moe("layer", "--checkpoint", folder, "--layer", 1, "--input", io, "--tensor", "x", "--expected", f"{io}:y", "--output",
               folder / f"out{ranks}{scheme}.safetensors", "--quantization", scheme, "--json", ranks=ranks)
    if done.returncode != 0:
        return f"{folder.name} as {scheme} on {ranks} ranks: {done.stderr}"
    error = json.loads(done.stdout)["error"]
    return None if error <= bound else f"{folder.name} as {scheme} on {ranks} ranks: error {error}"


def read(path):
    """(tensor name -> (dtype, shape, bytes), metadata)"""
    data = pathlib.Path(path).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + length])
    metadata = header.pop("__metadata__", {})
    body = data[8 + length:]
    return {name: (t["dtype"], t["shape"], body[slice(*t["data_offsets"])]) for name, t in header.items()}, metadata


def write(path, tensors, metadata=None):
    header = {"__metadata__": metadata} if metadata else {}
    body = b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(raw)]}
        body += raw
    text = json.dumps(header).encode()
    pathlib.Path(path).write_bytes(struct.pack("<Q", len(text)) + text + body)


def values(tensor):
    dtype, _, raw = tensor
    if dtype == "BF16":
        raw, dtype = b"".join(b"\0\0" + raw[i:i + 2] for i in range(0, len(raw), 2)), "F32"
    return list(array.array(CODES[dtype], raw))


def padded_block(file, output, hidden, intermediate):
    """A block file with rows and experts padded by zeros to these sizes: its values stay the same."""
    tensors, metadata = read(file)

    def pad(tensor, rows, columns):
        dtype, shape, raw = tensor
        size = len(raw) // (shape[0] * shape[1])
        width = shape[1] * size
        wide = b"".join(raw[i:i + width] + bytes((columns - shape[1]) * size) for i in range(0, len(raw), width))
        return dtype, [rows, columns], wide + bytes((rows - shape[0]) * columns * size)

    out = dict(tensors)
    for name, tensor in tensors.items():
        if name in ("hidden", "expected") or name.endswith("gate.weight"):
            out[name] = pad(tensor, tensor[1][0], hidden)
        elif ".shared_expert" in name:
            out[name] = pad(tensor, hidden, tensor[1][1]) if "down_proj" in name else pad(tensor, tensor[1][0], hidden)
        elif name.endswith(("down_proj.weight", "w2.weight")):
            out[name] = pad(tensor, hidden, intermediate)
        elif name.endswith(("gate_proj.weight", "up_proj.weight", "w1.weight", "w3.weight")):
            out[name] = pad(tensor, intermediate, hidden)
    write(output, out, {**metadata, "hidden_size": str(hidden), "intermediate_size": str(intermediate)})
    return output


def bf16_rows(file, folder, name="bf16_rows"):
    """A block file whose rows are bf16 values, with the output and routing that the host gives: the gate of a block on a device with bf16
    rows sees these rows, and a near tie of other rows may choose other experts."""
    tensors, metadata = read(file)
    bits = array.array("I", tensors["hidden"][2])
    rounded = array.array("I", [b + 0x7FFF + (b >> 16 & 1) & 0xFFFF0000 for b in bits])
    tensors["hidden"] = ("F32", tensors["hidden"][1], rounded.tobytes())
    block, output = pathlib.Path(folder) / f"{name}.safetensors", pathlib.Path(folder) / f"{name}_host.safetensors"
    write(block, tensors, metadata)
    run = moe("block", block, "--output", output, ranks=0)
    assert run.returncode == 0, run
    host = read(output)[0]
    write(block, {**tensors, "expected": host["output"], "topk_ids": host["topk_ids"], "topk_weights": host["topk_weights"]}, metadata)
    return block


def no_gpus(error, ranks):
    """The reason to skip a run on GPUs, from one exact message or None, and whether it holds for every run."""
    if error == NO_GPU or error.endswith((NO_NCCL, NO_CUDA)):
        return error, True
    if error.startswith(NOT_HOPPER):
        return error, False
    for gpus in range(1, ranks):
        if error == f"moe: E_UNSUPPORTED: --device cuda: {ranks} ranks on one node, which has {gpus} GPUs; each rank needs its own":
            return error, False
    return None, False


def rows(tensor):
    width = tensor[1][1]
    flat = values(tensor)
    return [flat[i:i + width] for i in range(0, len(flat), width)]


def raw(code, numbers):
    return array.array(code, numbers).tobytes()


def same_routing(got_ids, got_weights, want_ids, want_weights, skip_id=None):
    """Ids equal as sets in each row, weights to 1e-5. skip_id: the id that the reference writes as id 0 with weight 0."""
    if len(got_ids) != len(want_ids):
        return f"{len(got_ids)} rows, expected {len(want_ids)}"
    for row, (ids, weights, wanted, expected) in enumerate(zip(got_ids, got_weights, want_ids, want_weights)):
        got = {0: 0.0} if ids == [skip_id] else dict(zip(ids, weights))
        want = dict(zip(wanted, expected))
        if len(got) != len(ids) or set(got) != set(want):
            return f"row {row}: experts {sorted(ids)}, expected {sorted(wanted)}"
        for expert, weight in want.items():
            if not abs(got[expert] - weight) <= 1e-5 * abs(weight):
                return f"row {row}, expert {expert}: weight {got[expert]}, expected {weight}"
    return None


def same_output(got, want, bound=1e-5):
    """max |got - want| / max |want| at most `bound`; computed here, not by the tool."""
    largest = max(map(abs, want))
    if len(got) != len(want):
        return f"{len(got)} values, expected {len(want)}"
    error = max(abs(g - w) for g, w in zip(got, want)) / largest
    return None if error <= bound else f"error {error}"
