# SPDX-License-Identifier: Apache-2.0
# tests/tool/quantize_fused_test.py: `moe quantize` on checkpoints with fused experts of every orientation: the layouts that it writes,
# decoded here, and `moe layer` on them beside the original.
import json
import math
import pathlib
import random
import struct
import sys
import tempfile

from tool import in_parallel, moe, raw, read, same_output, values, write

HIDDEN, INTERMEDIATE, EXPERTS, TOPK, TOKENS = 256, 128, 4, 2, 6
E2M1 = [0, .5, 1, 1.5, 2, 3, 4, 6, -0.0, -.5, -1, -1.5, -2, -3, -4, -6]
BOUND = {"fp8_block128": .1, "fp8_per_channel": .1, "fp8_per_tensor": .1, "int8_per_channel": .03, "int4_group128": .4, "mxfp4": .6,
         "nvfp4": .4}
rng = random.Random(7)
failures = []


def check(ok, what):
    if not ok:
        failures.append(str(what))


def e4m3(code):
    sign, exponent, fraction = -1 if code & 128 else 1, code >> 3 & 15, code & 7
    return sign * (fraction / 512 if exponent == 0 else (1 + fraction / 8) * 2.0**(exponent - 7))


def numbers(count, width):
    return list(struct.unpack(f"<{count}f", raw("f", [rng.gauss(0, width) for _ in range(count)])))


class Family:
    """The canonical weights gate, up [E][I][H] and down [E][H][I], flat, and a checkpoint that holds them in one family's layout."""

    def __init__(self, folder, name, prefix, model_type, up_name, down_name, transposed, interleaved, config, nested):
        self.folder, self.name, self.prefix, self.transposed, self.interleaved = folder / name, name, prefix, transposed, interleaved
        self.up_name, self.down_name = up_name, down_name
        h, i = HIDDEN, INTERMEDIATE
        size = i * h
        self.gate, self.up, self.down = ([numbers(size, .1) for _ in range(EXPERTS)] for _ in range(3))
        gate_up, down = [], []
        for e in range(EXPERTS):
            rows = [self.gate[e][r * h:(r + 1) * h] for r in range(i)] + [self.up[e][r * h:(r + 1) * h] for r in range(i)]
            if interleaved:
                rows = [row for pair in zip(rows[:i], rows[i:]) for row in pair]
            wide = [self.down[e][r * i:(r + 1) * i] for r in range(h)]
            gate_up += [x for row in (zip(*rows) if transposed else rows) for x in row]
            down += [x for row in (zip(*wide) if transposed else wide) for x in row]
        router = {"granite": "router.layer", "gpt_oss": "router", "llama4": "router"}.get(name, "gate")
        up_shape, down_shape = ([h, 2 * i], [i, h]) if transposed else ([2 * i, h], [h, i])
        tensors = {f"{prefix}{router}.weight": ("F32", [EXPERTS, h], raw("f", numbers(EXPERTS * h, .1))),
                   prefix + up_name: ("F32", [EXPERTS, *up_shape], raw("f", gate_up)),
                   prefix + down_name: ("F32", [EXPERTS, *down_shape], raw("f", down)),
                   "lm_head.weight": ("F32", [2, 2], raw("f", [1, 2, 3, 4]))}
        if name == "gpt_oss":
            tensors |= {f"{prefix}router.bias": ("F32", [EXPERTS], raw("f", numbers(EXPERTS, .1))),
                        f"{prefix}experts.gate_up_proj_bias": ("F32", [EXPERTS, 2 * i], raw("f", numbers(EXPERTS * 2 * i, .1))),
                        f"{prefix}experts.down_proj_bias": ("F32", [EXPERTS, h], raw("f", numbers(EXPERTS * h, .1)))}
        if name == "llama4":
            for projection, shape in (("gate_proj", [i, h]), ("up_proj", [i, h]), ("down_proj", [h, i])):
                tensors[f"{prefix}shared_expert.{projection}.weight"] = ("F32", shape, raw("f", numbers(size, .1)))
        self.original = tensors
        self.folder.mkdir()
        # Two shards: the fused tensors of a layer need not lie in one file.
        shards = {"model-00001-of-00002.safetensors": {k: v for k, v in tensors.items() if k != prefix + down_name},
                  "model-00002-of-00002.safetensors": {prefix + down_name: tensors[prefix + down_name]}}
        for shard, held in shards.items():
            write(self.folder / shard, held)
        (self.folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {t: s for s, held in shards.items()
                                                                                             for t in held}}))
        fields = {"model_type": model_type, "hidden_act": "silu", "hidden_size": h, "num_experts_per_tok": TOPK, "num_hidden_layers": 1,
                  **config}
        (self.folder / "config.json").write_text(json.dumps({"model_type": nested, "text_config": fields} if nested else fields))
        self.io = folder / f"{name}_io.safetensors"
        write(self.io, {"x": ("F32", [TOKENS, h], raw("f", numbers(TOKENS * h, 1)))})


def families(folder):
    local = {"num_local_experts": EXPERTS, "intermediate_size": INTERMEDIATE}
    qwen = {"num_experts": EXPERTS, "moe_intermediate_size": INTERMEDIATE, "norm_topk_prob": True}
    return [
        Family(folder, "granite", "model.layers.0.block_sparse_moe.", "granitemoe", "input_linear.weight", "output_linear.weight", False,
               False, local, None),
        Family(folder, "qwen3", "model.layers.0.mlp.", "qwen3_moe", "experts.gate_up_proj", "experts.down_proj", False, False, qwen, None),
        Family(folder, "qwen3_vl", "model.language_model.layers.0.mlp.", "qwen3_vl_moe_text", "experts.gate_up_proj", "experts.down_proj",
               True, False, qwen, "qwen3_vl_moe"),
        Family(folder, "llama4", "language_model.model.layers.0.feed_forward.", "llama4_text", "experts.gate_up_proj", "experts.down_proj",
               True, False, {**local, "interleave_moe_layer_step": 1}, "llama4"),
        Family(folder, "gpt_oss", "model.layers.0.mlp.", "gpt_oss", "experts.gate_up_proj", "experts.down_proj", True, True, local, None),
    ]


def layer(checkpoint, io, output, *options):
    done = moe("layer", "--checkpoint", checkpoint, "--layer", 0, "--input", io, "--tensor", "x", "--output", output, *options, ranks=0)
    return values(read(output)[0]["output"]) if done.returncode == 0 else done.stderr


def written(folder):
    tensors = {}
    for shard in folder.glob("*.safetensors"):
        tensors.update(read(shard)[0])
    return tensors


def close(got, want, relative):
    """Root mean square error over root mean square."""
    return sum((a - b)**2 for a, b in zip(got, want, strict=True)) <= relative**2 * sum(b * b for b in want)


def check_layout(family, scheme, tensors, config):
    """One row of expert 2's up and down projections, decoded."""
    e, row, i, h = 2, 5, INTERMEDIATE, HIDDEN
    where = f"{family.name} as {scheme}"
    up_want, down_want = family.up[e][row * h:(row + 1) * h], family.down[e][row * i:(row + 1) * i]
    bound = {"int8_per_channel": .01, "int4_group128": .15, "mxfp4": .2, "nvfp4": .15}.get(scheme, .04)
    if scheme == "fp8_block128" or (family.name == "granite" and scheme in ("fp8_per_channel", "fp8_per_tensor", "int8_per_channel")):
        for tensor, rows, cols, want, column in ((family.up_name, *((h, 2 * i) if family.transposed else (2 * i, h)), up_want,
                                                 2 * row + 1 if family.interleaved else i + row),
                                                (family.down_name, *((i, h) if family.transposed else (h, i)), down_want, row)):
            dtype, shape, codes = tensors[family.prefix + tensor]
            check(dtype == ("I8" if scheme.startswith("int8") else "F8_E4M3") and shape == [EXPERTS, rows, cols],
                  f"{where}: {tensor} {dtype} {shape}")
            suffix = "_scale_inv" if scheme == "fp8_block128" else "_scale"
            s_dtype, s_shape, _ = tensors[family.prefix + tensor + suffix]
            scales = values(tensors[family.prefix + tensor + suffix])
            want_shape = {"fp8_block128": [EXPERTS, -(-rows // 128), -(-cols // 128)],
                          "fp8_per_tensor": [EXPERTS, 1]}.get(scheme, [EXPERTS, rows, 1])
            check(s_dtype == "F32" and s_shape == want_shape, f"{where}: {tensor}{suffix} {s_dtype} {s_shape}")

            def scale(r, c):
                if scheme == "fp8_block128":
                    return scales[(e * s_shape[1] + r // 128) * s_shape[2] + c // 128]
                return scales[e * (rows if scheme != "fp8_per_tensor" else 1) + (r if scheme != "fp8_per_tensor" else 0)]

            def value(r, c):
                code = codes[(e * rows + r) * cols + c]
                return (code - 256 * (code > 127) if dtype == "I8" else e4m3(code)) * scale(r, c)
            got = [value(x, column) for x in range(rows)] if family.transposed else [value(column, x) for x in range(cols)]
            check(close(got, want, bound), f"{where}: {tensor} has other values")
        return
    if family.name == "gpt_oss":
        check(config["quantization_config"]["quant_method"] == "mxfp4", f"{where}: {config}")
        for tensor, out, width, want, r in ((family.up_name, 2 * i, h, up_want, 2 * row + 1), (family.down_name, h, i, down_want, row)):
            blocks, exponents = tensors[f"{family.prefix}{tensor}_blocks"], tensors[f"{family.prefix}{tensor}_scales"]
            check(blocks[:2] == ("U8", [EXPERTS, out, width // 32, 16]) and exponents[:2] == ("U8", [EXPERTS, out, width // 32]),
                  f"{where}: {tensor}")
            at = e * out + r
            packed, scales = blocks[2][at * width // 2:(at + 1) * width // 2], exponents[2][at * width // 32:(at + 1) * width // 32]
            got = [E2M1[byte >> shift & 15] * 2.0**(scales[(2 * n + (shift > 0)) // 32] - 127) for n, byte in enumerate(packed)
                   for shift in (0, 4)]
            check(close(got, want, bound), f"{where}: {tensor} has other values")
            check(family.prefix + tensor not in tensors, f"{where}: the original is still there")
        return
    names = ("w1", "w3", "w2") if family.name == "granite" else ("gate_proj", "up_proj", "down_proj")
    for name, rows, cols, want in ((names[0], i, h, family.gate[e][row * h:(row + 1) * h]), (names[1], i, h, up_want),
                                   (names[2], h, i, down_want)):
        base = f"{family.prefix}experts.{e}.{name}"
        if scheme in ("fp8_per_channel", "fp8_per_tensor", "int8_per_channel"):
            dtype, shape, codes = tensors[base + ".weight"]
            scales = values(tensors[base + ".weight_scale"])
            got = [(c - 256 * (c > 127) if dtype == "I8" else e4m3(c)) * scales[row if "channel" in scheme else 0]
                   for c in codes[row * cols:(row + 1) * cols]]
        elif scheme == "int4_group128":
            dtype, shape, codes = tensors[base + ".weight_packed"]
            check(dtype == "I32" and values(tensors[base + ".weight_shape"]) == [rows, cols], f"{where}: {name}")
            scales = values(tensors[base + ".weight_scale"])[row * cols // 128:]
            got = [((byte >> shift & 15) - 8) * scales[(2 * n + (shift > 0)) // 128]
                   for n, byte in enumerate(codes[row * cols // 2:(row + 1) * cols // 2]) for shift in (0, 4)]
        else:
            dtype, shape, codes = tensors[base + ".weight_packed"]
            group = 32 if scheme == "mxfp4" else 16
            stored = tensors[base + ".weight_scale"][2][row * cols // group:(row + 1) * cols // group]
            divisor = values(tensors[base + ".weight_global_scale"])[0] if scheme == "nvfp4" else 1
            scales = [2.0**(b - 127) if scheme == "mxfp4" else e4m3(b) / divisor for b in stored]
            got = [E2M1[byte >> shift & 15] * scales[(2 * n + (shift > 0)) // group]
                   for n, byte in enumerate(codes[row * cols // 2:(row + 1) * cols // 2]) for shift in (0, 4)]
        check(close(got, want, bound), f"{where}: {name} has other values")


def convert(family, scheme):
    """Quantises a family's checkpoint; returns what `moe layer` computes from it."""
    where, out = f"{family.name} as {scheme}", family.folder.parent / f"{family.name}_{scheme}"
    done = moe("quantize", "--scheme", scheme, "--input", family.folder, "--output", out, "--json", ranks=0)
    if done.returncode != 0:
        return f"{where}: {done.stderr}"
    tensors, config, index = written(out), json.loads((out / "config.json").read_text()), json.loads((out /
    "model.safetensors.index.json").read_text())
    check(set(index["weight_map"]) == set(tensors), f"{where}: the index is not complete")
    kept = {name for name in family.original if name not in (family.prefix + family.up_name, family.prefix + family.down_name)}
    check(all(tensors[name] == family.original[name] for name in kept), f"{where}: another tensor was changed")
    scales_of_both = (family.up_name.split(".")[-1] + "_scale_inv", "_blocks", "input_linear.weight_scale", "input_linear.weight_scale_inv")
    both_in_one = any(t.endswith(scales_of_both) for t in tensors)  # gate and up are one weight
    check(json.loads(done.stdout)["expert_weights"] == EXPERTS * (2 if both_in_one else 3), f"{where}: {done.stdout}")
    check_layout(family, scheme, tensors, config)
    return layer(out, family.io, out / "y.safetensors")


def compare(family, scheme):
    where, folder = f"{family.name} as {scheme}", family.folder.parent
    got = convert(family, scheme)
    original = layer(family.folder, family.io, folder / f"{family.name}_{scheme}_y.safetensors")
    if isinstance(got, str) or isinstance(original, str):
        check(False, f"{where}: {got if isinstance(got, str) else original}")
        return
    check(same_output(got, original, 1e-7) is not None, f"{where}: nothing was quantised")
    check(same_output(got, original, BOUND[scheme]) is None, f"{where}: {same_output(got, original, BOUND[scheme])}")
    if scheme == "int4_group128":  # weights only, so a layer that quantises at load gives the same output
        direct = layer(family.folder, family.io, folder / f"{family.name}_{scheme}_direct.safetensors", "--quantization", scheme)
        check(not isinstance(direct, str) and same_output(got, direct, 1e-5) is None,
              f"{where}: --quantization gives another output: {direct}")


def refusals(folder, all_families):
    oss = next(f for f in all_families if f.name == "gpt_oss")
    for scheme in ("int4_group128", "fp8_per_channel", "nvfp4"):
        done = moe("quantize", "--scheme", scheme, "--input", oss.folder, "--output", folder / "refused", ranks=0)
        check(done.returncode == 1 and f"fused experts with biases are written as mxfp4 or fp8_block128, not as {scheme}" in done.stderr and
              done.stderr.count("\n") == 1, done.stderr)
    again = moe("quantize", "--scheme", "mxfp4", "--input", folder / "gpt_oss_mxfp4", "--output", folder / "refused", ranks=0)
    check(again.returncode == 1 and "is quantised already" in again.stderr, again.stderr)
    ruled = moe("quantize", "--scheme", "mxfp4", "--mx-rule", "ceil", "--input", oss.folder, "--output", folder / "ruled", ranks=0)
    name = f"{oss.prefix}{oss.up_name}_scales"
    check(ruled.returncode == 0 and written(folder / "ruled")[name] != written(folder / "gpt_oss_mxfp4")[name],
          f"--mx-rule ceil: {ruled.stderr}")
    # NaN in the first expert's gate row 0: in a fused tensor that stays fused, in one that becomes modules, in blocks
    for family, scheme, where in ((oss, "mxfp4", "expert 0: element [0, 0] is nan"),
                                  (oss, "fp8_block128", "expert 0: element [0, 0] is nan"),
                                  (next(f for f in all_families if f.name == "qwen3_vl"), "mxfp4",
                                   "experts.0.gate_proj' of the fused experts: element [0, 0] is nan")):
        path = family.folder / "model-00001-of-00002.safetensors"
        held, up = read(path)[0], family.prefix + family.up_name
        numbers_ = values(held[up])
        numbers_[0] = math.nan
        write(path, {**held, up: (*held[up][:2], raw("f", numbers_))})
        done = moe("quantize", "--scheme", scheme, "--input", family.folder, "--output", folder / "refused", ranks=0)
        check(done.returncode == 1 and where in done.stderr, f"NaN in {family.name} as {scheme}: {done.returncode} {done.stderr}")
    check(not (folder / "refused").exists() and not list(folder.glob("*.partial-*")), "a refused conversion left something")


with tempfile.TemporaryDirectory() as temporary:
    root = pathlib.Path(temporary)
    made = families(root)
    in_parallel([(compare, f, s) for f in made for s in (BOUND if f.name != "gpt_oss" else ("mxfp4", "fp8_block128"))], 3)
    refusals(root, made)
print("\n".join(f"FAILED: {f}" for f in failures))
print(f"{len(failures)} failed")
sys.exit(1 if failures else 0)
