# SPDX-License-Identifier: Apache-2.0
# bench/compare_table.py: what bench/compare.py knows without a GPU: shapes, element types, floors, bounds on errors, spreads and the table.
# Needs nothing but Python.
import dataclasses
import statistics

OURS = "this library"
OURS_FP8 = "this library w4a8"
OURS_W8A16 = "this library w8a16"

SHAPES = {  # experts, hidden, intermediate, topk
    "mixtral-8x7b": (8, 4096, 14336, 2),
    "qwen3-30b-a3b": (128, 2048, 768, 8),
    "qwen3-235b-a22b": (128, 4096, 1536, 8),
    "deepseek-v3-ep8rank": (32, 7168, 2048, 1),
    "gpt-oss-120b": (128, 2880, 2880, 4),
    "gpt-oss-20b": (32, 2880, 2880, 4),
    "kimi-k2": (384, 7168, 2048, 8),
    "deepseek-v4-flash-ep8rank": (32, 4096, 2048, 6),
    "deepseek-v4-pro-ep8rank": (48, 7168, 3072, 6),
}
FIVE = ("mixtral-8x7b", "qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3-ep8rank", "gpt-oss-120b")
MXFP4 = ("gpt-oss-120b", "gpt-oss-20b", "deepseek-v4-flash-ep8rank", "deepseek-v4-pro-ep8rank")

# One H200, docs/log/hopper.md; for the second floor in the JSON. int8: fp8's, which is nominally the same; it was not measured.
BASELINE_READ = 4472e9
BASELINE_FLOPS = {"bf16": 679.8e12, "fp8": 1266e12, "int8": 1266e12}


@dataclasses.dataclass(frozen=True)
class Dtype:
    """Weights of one element type. `group` columns of a row share a scale of `scale_bytes`; 0: a scale per row, None: see `blocks`."""

    name: str
    bits: int
    activations: str  # of this library's first candidate, and of the floor in "floor_us"
    shapes: tuple
    group: int | None = None
    scale_bytes: int = 0
    blocks: bool = False  # a scale per 128 x 128

    @property
    def packed(self):
        """Whether biases and gpt-oss's activation belong to the layer, as the checkpoints in these types have them."""
        return self.bits == 4

    def matrix_bytes(self, rows, cols):
        """Codes and scales of one expert's matrix as a checkpoint holds them."""
        codes = rows * cols * self.bits / 8
        if self.blocks:
            return codes + 4 * ceil(rows, 128) * ceil(cols, 128)
        if self.group is None:
            return codes
        return codes + self.scale_bytes * rows * (ceil(cols, self.group) if self.group else 1)

    def unfit(self, shape):
        """Why a shape cannot be in this type, or None."""
        _, hidden, inter, _ = shape
        multiple = 128 if self.blocks else self.group or 1
        if hidden % multiple or inter % multiple:
            return f"its sizes are not multiples of {multiple}"
        return None


DTYPES = {
    d.name: d
    for d in (
        Dtype("bf16", 16, "bf16", FIVE),
        Dtype("fp8", 8, "fp8", FIVE, blocks=True),
        Dtype("int8", 8, "int8", FIVE, group=0, scale_bytes=2),
        Dtype("mxfp4", 4, "bf16", MXFP4, group=32, scale_bytes=1),
        Dtype("int4", 4, "bf16", ("kimi-k2",), group=128, scale_bytes=2),
        Dtype("int4_32", 4, "bf16", ("kimi-k2",), group=32, scale_bytes=2),
        Dtype("nvfp4", 4, "bf16", ("deepseek-v4-flash-ep8rank", "qwen3-30b-a3b"), group=16, scale_bytes=1),
    )
}


def ceil(a, b):
    return (a + b - 1) // b


def floors(shape, dtype, tokens, hit, rates, read):
    """Microseconds for each kind of activations: the larger of useful operations over its rate and least bytes (the weights of the `hit`
    experts, once, input and output in bf16) over the read rate."""
    _, hidden, inter, topk = shape
    flops = 6 * tokens * topk * hidden * inter
    least = hit * (dtype.matrix_bytes(2 * inter, hidden) + dtype.matrix_bytes(hidden, inter)) + 4 * tokens * hidden
    return {kind: 1e6 * max(flops / rate, least / read) for kind, rate in rates.items()}


def tolerance(dtype, activations, tokens, ours, whole=True):
    """Most relative distance from float32 on the candidate's own dequantised weights and equally quantised activations."""
    if not whole:
        return 2e-2  # of the two products
    if DTYPES[dtype].bits == 4 or (dtype == "int8" and activations == "bf16") or dtype == "bf16":
        if not ours:
            return 1e-2  # peers round router weights and slots to bf16
        return 5e-3 if activations == "bf16" else 1e-2  # e4m3: a code of the intermediate may round the other way
    if dtype == "int8":
        return 5e-3 if ours else 2e-2  # peers quantise an intermediate rounded to bf16
    # fp8: with few tokens one code that rounds the other way is a large part. Peers round the products and the activation to bf16 before
    # they quantise it.
    return 1e-2 if ours and tokens >= 8 else 4e-2


def spread(times):
    """(lowest, 10 %, 90 %, highest) of some times, each relative to the median, minus 1."""
    order, middle = sorted(times), statistics.median(times)
    tenth = len(order) // 10
    return tuple(order[i] / middle - 1 for i in (0, tenth, -1 - tenth, -1))


def line(shape, dtype, point):
    """One point: each candidate with its time, the ratio to its floor, this library's ratio to it, and its spread if over 3 %."""
    text = f"{shape:25s} {dtype:7s} M{point['tokens']:<6d} floor {point['floor_us']:8.1f}"
    ours = point["us"].get(OURS)
    for name, us in point["us"].items():
        text += f" | {name} {us:8.1f} x{us / point['floors_us'][name]:.2f}"
        if name != OURS and ours is not None:
            text += f" ours/it {ours / us:.2f}"
        text += f" (single {point['single_us'][name]:.1f})"
        if name in point["errors"]:
            text += f" error {point['errors'][name]:.1e}"
        _, low, high, _ = point["spread"][name]
        if high - low > 0.03:
            text += f" spread {100 * low:+.1f}..{100 * high:+.1f}%"
    return text


def numbers(text, what, low, high):
    """Comma-separated whole numbers in range, or ValueError with what is wrong."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{what}: {text!r} is not a list of whole numbers") from None
    for value in values:
        if not low <= value <= high:
            raise ValueError(f"{what}: {value} is out of range, {low} to {high}")
    return values


def names(text, what, known):
    """Comma-separated names of `known`, or ValueError with the one that is not."""
    chosen = text.split(",")
    for name in chosen:
        if name not in known:
            raise ValueError(f"{what}: no {name!r}; there are: {', '.join(known)}")
    return chosen
