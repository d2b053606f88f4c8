# SPDX-License-Identifier: Apache-2.0
# tests/tool/packings_test.py: `moe layer` on tiny checkpoints in every packing of released quantised checkpoints, dequantised and in the
# scheme that the checkpoint stores. The packing and the expected output are computed here from the formats' descriptions, without the
# library.
import json
import math
import pathlib
import random
import struct
import sys
import tempfile

from tool import in_parallel, layer_problem, moe, raw, write

HIDDEN, INTERMEDIATE, EXPERTS, TOPK, TOKENS = 64, 32, 4, 2, 5
LAYER = "model.layers.1.mlp."
PROJECTIONS = {"gate_proj": (INTERMEDIATE, HIDDEN), "up_proj": (INTERMEDIATE, HIDDEN), "down_proj": (HIDDEN, INTERMEDIATE)}
E2M1 = [0, .5, 1, 1.5, 2, 3, 4, 6, -0.0, -.5, -1, -1.5, -2, -3, -4, -6]
rng = random.Random(5)


def f32(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


def f16(x):
    return struct.unpack("<e", struct.pack("<e", x))[0]


def halves(numbers):
    return struct.pack(f"<{len(numbers)}e", *numbers)


def words(fields, bits):
    """int32 words, the first field in the lowest bits."""
    per_word = 32 // bits
    out = b""
    for i in range(0, len(fields), per_word):
        out += struct.pack("<I", sum(code << (bits * lane) for lane, code in enumerate(fields[i:i + per_word])))
    return out


def e4m3(code):
    sign, exponent, fraction = -1 if code & 128 else 1, code >> 3 & 15, code & 7
    return sign * (fraction / 512 if exponent == 0 else (1 + fraction / 8) * 2.0**(exponent - 7))


def matrix(rows, cols, f):
    return [[f(i, j) for j in range(cols)] for i in range(rows)]


def flat(m):
    return [x for row in m for x in row]


def transposed(m):
    return [list(column) for column in zip(*m)]


def nibbles(codes):
    """Two 4-bit codes a byte, the even element low."""
    return bytes(row[j] | row[j + 1] << 4 for row in codes for j in range(0, len(row), 2))


# Each scheme: (name, rows, cols) -> (tensors, the matrix that they encode).


def integers(rows, cols, bits, group, symmetric):
    codes = matrix(rows, cols, lambda i, j: rng.randrange(1 << bits))
    zeros = matrix(rows, cols // group, lambda i, g: 1 << (bits - 1) if symmetric else rng.randrange(1 << bits))
    scales = matrix(rows, cols // group, lambda i, g: f16(rng.uniform(.2, 1) / (1 << bits)))
    return codes, zeros, scales


def gptq(bits, group, symmetric=False, order=False, version=1):
    def make(name, rows, cols):
        size = cols if group == -1 else group
        codes, zeros, scales = integers(rows, cols, bits, size, symmetric)
        index = [j // size for j in range(cols)]
        if order:
            rng.shuffle(index)
        per_word = 32 // bits
        packed = b"".join(words([codes[n][k + lane] for lane in range(per_word)], bits) for k in range(0, cols, per_word)
                          for n in range(rows))
        stored = [[(z - (1 if version == 1 else 0)) & ((1 << bits) - 1) for z in row] for row in transposed(zeros)]
        tensors = {
            f"{name}.qweight": ("I32", [cols // per_word, rows], packed),
            f"{name}.qzeros": ("I32", [cols // size, rows // per_word], b"".join(words(row, bits) for row in stored)),
            f"{name}.scales": ("F16", [cols // size, rows], halves(flat(transposed(scales)))),
            f"{name}.g_idx": ("I32", [cols], raw("i", index)),
        }
        return tensors, matrix(rows, cols, lambda n, k: (codes[n][k] - zeros[n][index[k]]) * scales[n][index[k]])
    return make


def awq(group):
    def make(name, rows, cols):
        codes, zeros, scales = integers(rows, cols, 4, group, False)
        in_order = [0, 2, 4, 6, 1, 3, 5, 7]  # nibble i of a word holds output channel in_order[i] of its eight

        def pack(table):
            return b"".join(words([row[n + lane] for lane in in_order], 4) for row in table for n in range(0, rows, 8))

        tensors = {
            f"{name}.qweight": ("I32", [cols, rows // 8], pack(transposed(codes))),
            f"{name}.qzeros": ("I32", [cols // group, rows // 8], pack(transposed(zeros))),
            f"{name}.scales": ("F16", [cols // group, rows], halves(flat(transposed(scales)))),
        }
        return tensors, matrix(rows, cols, lambda n, k: (codes[n][k] - zeros[n][k // group]) * scales[n][k // group])
    return make


def compressed_integers(bits, group, symmetric=True, order=False):
    def make(name, rows, cols):
        size = cols if group == -1 else group
        codes, zeros, scales = integers(rows, cols, bits, size, symmetric)
        index = [j // size for j in range(cols)]
        if order:
            rng.shuffle(index)
        tensors = {
            f"{name}.weight_packed": ("I32", [rows, cols * bits // 32], b"".join(words(row, bits) for row in codes)),
            f"{name}.weight_scale": ("F16", [rows, cols // size], halves(flat(scales))),
            f"{name}.weight_shape": ("I64", [2], struct.pack("<2q", rows, cols)),
        }
        if not symmetric:
            per_word = 32 // bits
            packed = b"".join(words([zeros[n + lane][g] for lane in range(per_word)], bits) for n in range(0, rows, per_word)
                              for g in range(cols // size))
            tensors[f"{name}.weight_zero_point"] = ("I32", [rows // per_word, cols // size], packed)
        if order:
            tensors[f"{name}.weight_g_idx"] = ("I32", [cols], raw("i", index))
        return tensors, matrix(rows, cols, lambda n, k: (codes[n][k] - zeros[n][index[k]]) * scales[n][index[k]])
    return make


def int8(per_row, zero_point=False):
    def make(name, rows, cols):
        codes = matrix(rows, cols, lambda i, j: rng.randrange(-128, 128))
        scales = [f32(rng.uniform(.001, .004)) for _ in range(rows if per_row else 1)]
        zeros = [rng.randrange(-20, 20) if zero_point else 0 for _ in scales]
        tensors = {f"{name}.weight": ("I8", [rows, cols], raw("b", flat(codes))),
                   f"{name}.weight_scale": ("F32", [rows, 1] if per_row else [1], raw("f", scales))}
        if zero_point:
            tensors[f"{name}.weight_zero_point"] = ("I8", [rows, 1], raw("b", zeros))
        return tensors, matrix(rows, cols, lambda n, k: (codes[n][k] - zeros[n % len(zeros)]) * scales[n % len(scales)])
    return make


def fp8(shape_of, scale_at, suffix=".weight_scale", exponents=False):
    """shape_of(rows, cols): the scales' shape; scale_at(n, k, scales' columns): the index of the scale of an element."""
    def make(name, rows, cols):
        codes = matrix(rows, cols, lambda i, j: rng.choice([0, 128]) | rng.randrange(0x7F))
        shape = shape_of(rows, cols)
        count = math.prod(shape)
        stored = [rng.randrange(113, 117) for _ in range(count)] if exponents else [f32(rng.uniform(.0005, .002)) for _ in range(count)]
        scales = [2.0**(b - 127) for b in stored] if exponents else stored
        tensors = {f"{name}.weight": ("F8_E4M3", [rows, cols], bytes(flat(codes))),
                   f"{name}{suffix}": ("U8", shape, bytes(stored)) if exponents else ("F32", shape, raw("f", stored))}
        return tensors, matrix(rows, cols, lambda n, k: e4m3(codes[n][k]) * scales[scale_at(n, k, shape[-1] if shape else 1)])
    return make


def nvfp4(packed_name, global_name, divides, factor_of=lambda name: f32(rng.uniform(.0005, .001))):
    def make(name, rows, cols):
        codes = matrix(rows, cols, lambda i, j: rng.randrange(16))
        blocks = matrix(rows, cols // 16, lambda i, g: rng.randrange(0x40, 0x78))
        factor = factor_of(name)
        stored = f32(1 / factor) if divides else factor
        tensors = {f"{name}{packed_name}": ("U8", [rows, cols // 2], nibbles(codes)),
                   f"{name}.weight_scale": ("F8_E4M3", [rows, cols // 16], bytes(flat(blocks))),
                   f"{name}{global_name}": ("F32", [1] if divides else [], raw("f", [stored]))}
        exact = 1 / stored if divides else stored
        return tensors, matrix(rows, cols, lambda n, k: E2M1[codes[n][k]] * e4m3(blocks[n][k // 16]) * exact)
    return make


def mxfp4(name, rows, cols):
    codes = matrix(rows, cols, lambda i, j: rng.randrange(16))
    exponents = matrix(rows, cols // 32, lambda i, g: rng.randrange(120, 126))
    tensors = {f"{name}.weight_packed": ("U8", [rows, cols // 2], nibbles(codes)),
               f"{name}.weight_scale": ("U8", [rows, cols // 32], bytes(flat(exponents)))}
    return tensors, matrix(rows, cols, lambda n, k: E2M1[codes[n][k]] * 2.0**(exponents[n][k // 32] - 127))


def groups(format_, **weights):
    return {"quant_method": "compressed-tensors", "format": format_, "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}}


PER_ROW = (lambda n, k: [n, 1]), (lambda n, k, _: n)
PER_TENSOR = (lambda n, k: [1]), (lambda n, k, _: 0)
BLOCKS = (lambda n, k: [n // 16, k // 32]), (lambda n, k, cols: n // 16 * cols + k // 32)
GROUPS_OF_32 = (lambda n, k: [n, k // 32]), (lambda n, k, cols: n * cols + k // 32)
SCHEMES = {
    "gptq4": (gptq(4, 32), {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}),
    "gptq4_symmetric": (gptq(4, 16, symmetric=True), {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": True}),
    "gptq4_desc_act": (gptq(4, 16, order=True), {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True}),
    "gptq4_v2": (gptq(4, 32, version=2), {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"}),
    "gptq8_whole_row": (gptq(8, -1), {"quant_method": "gptq", "bits": 8, "group_size": -1}),
    "awq": (awq(32), {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}),
    "awq_old_words": (awq(16), {"quant_method": "awq", "w_bit": 4, "q_group_size": 16, "version": "GEMM"}),
    "packed_int4": (compressed_integers(4, 32), groups("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32)),
    "packed_int4_zero_points": (compressed_integers(4, 16, symmetric=False),
                                groups("pack-quantized", num_bits=4, type="int", strategy="group", group_size=16, symmetric=False)),
    "packed_int4_order": (compressed_integers(4, 16, order=True),
                          groups("pack-quantized", num_bits=4, type="int", strategy="group", group_size=16, actorder="group")),
    "packed_int8_channel": (compressed_integers(8, -1), groups("pack-quantized", num_bits=8, type="int", strategy="channel")),
    "int8_channel": (int8(True), groups("int-quantized", num_bits=8, type="int", strategy="channel")),
    "int8_channel_zero_points": (int8(True, True), groups("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=False)),
    "int8_tensor": (int8(False), groups("int-quantized", num_bits=8, type="int", strategy="tensor")),
    "fp8_channel": (fp8(*PER_ROW), groups("float-quantized", num_bits=8, type="float", strategy="channel")),
    "fp8_tensor": (fp8(*PER_TENSOR), groups("float-quantized", num_bits=8, type="float", strategy="tensor")),
    "fp8_block": (fp8(*BLOCKS), groups("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[16, 32])),
    "fp8_block_inv": (fp8(*BLOCKS, ".weight_scale_inv"), {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 32]}),
    "fp8_static": (fp8(*PER_TENSOR), {"quant_method": "fp8", "activation_scheme": "static"}),
    "mxfp8": (fp8(*GROUPS_OF_32, exponents=True), groups("mxfp8-quantized", num_bits=8, type="float", strategy="group", group_size=32)),
    "nvfp4": (nvfp4(".weight_packed", ".weight_global_scale", True),
              groups("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16)),
    "nvfp4_modelopt": (nvfp4(".weight", ".weight_scale_2", False), {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}),
    "fp8_modelopt": (fp8((lambda n, k: []), (lambda n, k, _: 0)), {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "nvfp4_one_global": (nvfp4(".weight_packed", ".weight_global_scale", True, lambda name: 1 / 1500),
                         groups("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16)),
    "packed_int4_zeros_32": (compressed_integers(4, 32, symmetric=False),
                             groups("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32, symmetric=False)),
    "mxfp4": (mxfp4, groups("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32)),
}
# Schemes of weights alone that hold what a checkpoint stores: codes and scales are taken as they are, so the error is that of float32.
OWN = {"gptq4": "int4_group32_zero", "gptq4_v2": "int4_group32_zero", "awq": "int4_group32_zero", "packed_int4": "int4_group32",
       "packed_int4_zeros_32": "int4_group32_zero", "int8_channel": "int8_per_channel", "int8_tensor": "int8_per_channel",
       "fp8_channel": "fp8_per_channel", "fp8_tensor": "fp8_per_channel", "mxfp8": "mxfp8_w8a16", "nvfp4_one_global": "nvfp4_w4a16",
       "mxfp4": "mxfp4_w4a16"}
# A checkpoint, a scheme of its form that cannot hold it, and what is refused: the tensor's name among it.
REFUSED = (("packed_int4_zeros_32", "int4_group32", ("weight_zero_point'", "int4_group32 is symmetric, but row")),
           ("gptq4", "int4_group32", ("qweight'", "int4_group32 is symmetric, but row")),
           ("nvfp4", "nvfp4_w4a16", ("weight_global_scale'", "differs from")))


def silu(x):
    return x / (1 + math.exp(-x))


def times(m, x):
    return [sum(a * b for a, b in zip(row, x)) for row in m]


def block(router, experts, x):
    logits = times(router, x)
    chosen = sorted(range(EXPERTS), key=lambda e: -logits[e])[:TOPK]
    weights = [math.exp(logits[e] - logits[chosen[0]]) for e in chosen]
    out = [0.0] * HIDDEN
    for e, weight in zip(chosen, weights):
        m = experts[e]
        inner = [silu(g) * u for g, u in zip(times(m["gate_proj"], x), times(m["up_proj"], x))]
        for i, y in enumerate(times(m["down_proj"], inner)):
            out[i] += weight / sum(weights) * y
    return out


def checkpoint(folder, make, quantization):
    folder.mkdir()
    router = matrix(EXPERTS, HIDDEN, lambda i, j: f32(rng.uniform(-.3, .3)))
    tensors = {LAYER + "gate.weight": ("F32", [EXPERTS, HIDDEN], raw("f", flat(router)))}
    experts = []
    for e in range(EXPERTS):
        experts.append({})
        for projection, (rows, cols) in PROJECTIONS.items():
            stored, experts[e][projection] = make(f"{LAYER}experts.{e}.{projection}", rows, cols)
            tensors |= stored
    write(folder / "model.safetensors", tensors)
    config = {"model_type": "qwen3_moe", "hidden_act": "silu", "hidden_size": HIDDEN, "moe_intermediate_size": INTERMEDIATE,
              "num_experts": EXPERTS, "num_experts_per_tok": TOPK, "num_hidden_layers": 2, "norm_topk_prob": True,
              "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    x = matrix(TOKENS, HIDDEN, lambda i, j: f32(rng.uniform(-1, 1)))
    expected = [block(router, experts, row) for row in x]
    write(folder.parent / f"{folder.name}_io.safetensors", {"x": ("F32", [TOKENS, HIDDEN], raw("f", flat(x))),
                                                            "y": ("F32", [TOKENS, HIDDEN], raw("f", flat(expected)))})


def refused(folder, scheme, parts):
    """Nothing if `moe layer` refuses to read the checkpoint in the scheme with these words."""
    done = moe("layer", "--checkpoint", folder, "--layer", 1, "--input", folder.parent / f"{folder.name}_io.safetensors", "--tensor", "x",
               "--output", folder / "never.safetensors", "--quantization", scheme, ranks=0)
    right = done.returncode == 1 and done.stderr.startswith("moe: E_CONFIG: tensor '" + LAYER) and all(p in done.stderr for p in parts)
    return None if right else f"{folder.name} as {scheme}: {done.returncode} {done.stderr}"


with tempfile.TemporaryDirectory() as temporary:
    root = pathlib.Path(temporary)
    jobs = []
    for name, (make, quantization) in SCHEMES.items():
        checkpoint(root / name, make, quantization)
        jobs += [(layer_problem, root / name, ranks, 2e-6) for ranks in ((0, 3) if name in ("gptq4_desc_act", "awq", "nvfp4") else (0,))]
    # ModelOpt's first releases leave config.json unchanged and state the quantisation in a separate file.
    old = root / "nvfp4_modelopt_old"
    checkpoint(old, nvfp4(".weight", ".weight_scale_2", False), None)
    (old / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"},
                                                          "quantization": {"quant_algo": "NVFP4", "group_size": 16}}))
    jobs.append((layer_problem, old, 0, 2e-6))
    jobs += [(layer_problem, root / name, 0, 2e-6, scheme) for name, scheme in OWN.items()]
    jobs.append((layer_problem, root / "awq", 3, 2e-6, OWN["awq"]))
    # Groups that the scheme does not have are not its form: the weights are quantised, with its error.
    jobs.append((layer_problem, root / "packed_int4", 0, .3, "int4_group128"))
    jobs += [(refused, root / name, scheme, parts) for name, scheme, parts in REFUSED]
    failures = [problem for problem in in_parallel(jobs, 4) if problem]
print("\n".join(f"FAILED: {f}" for f in failures))
print(f"{len(jobs)} runs, {len(failures)} failed")
sys.exit(1 if failures else 0)
