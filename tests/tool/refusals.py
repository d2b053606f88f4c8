# SPDX-License-Identifier: Apache-2.0
# tests/tool/refusals.py: runs the tool on the same input over the windows of the host and of the device, and compares what they say.
from tool import moe, no_gpus

BACKENDS = ("low_latency", "high_throughput", "one_sided", "two_sided", "pplx", "low_latency_rank_major")
REFERENCE = {"host": ("--experts", "reference"), "cuda": ("--experts", "cuda_reference")}


class NeedsGpu(str):
    """What the tool says where the device does not suffice for the input to be checked."""


def with_options(arguments, options):
    """The arguments with the options for each program that mpirun starts."""
    if ":" not in arguments:
        return [*arguments, *options]
    at = arguments.index(":")
    return [*arguments[:at], *options, *arguments[at:], *options]


def with_output(arguments, output):
    return arguments if "--output" in arguments else [*arguments, "--output", output]


def all_ranks(arguments, ranks):
    """Those of the first program, and those after "-n" of a second."""
    return ranks + (arguments[arguments.index(":") + 2] if ":" in arguments else 0)


def sentence(error):
    """What is said of the input: without the names of the device and its experts, and without how to build another program."""
    words = error.strip().replace("cuda_reference", "reference").replace("--device cuda", "--device host")
    return words.partition(": not in this program: ")[0]


def same_refusal(name, arguments, backend, ranks, spaces=REFERENCE, timeout=120):
    """None if both spaces refuse the input with one line, on the device with the exit code and the words of the host, to which it may add;
    else what is wrong, or NeedsGpu. spaces: the options of each, which may name another backend. timeout: of each run, in seconds."""
    def run(space):
        named = () if "--backend" in spaces[space] else ("--backend", backend)
        return moe(*with_options(arguments, ["--device", space, *named, *spaces[space]]), ranks=ranks, timeout=timeout)

    host, device = run("host"), run("cuda")
    for done in (host, device):
        if done.returncode not in (1, 2) or done.stdout or done.stderr.count("\n") != 1:
            return f"{name}, {backend} on {ranks} ranks is not refused with one line: {done}"
    reason = no_gpus(device.stderr.strip(), all_ranks(arguments, ranks))[0]
    if reason:
        return NeedsGpu(reason)
    if device.returncode != host.returncode or not sentence(device.stderr).startswith(sentence(host.stderr)):
        said = f"\n    host {host.returncode}: {host.stderr}    cuda {device.returncode}: {device.stderr}"
        return f"{name}, {backend} on {ranks} ranks:{said}"
    return None
