#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`moe quantize`: every scheme against the reference files, checkpoints in released layouts, and bad input."""
import json
import math
import os
import pathlib
import shutil
import struct
import subprocess
import sys
import tempfile

from tool import read, write

TOOL = os.environ["MOE_TOOL"]
GOLDEN = pathlib.Path(os.environ.get("MOE_GOLDEN_DIR") or os.environ["MOE_TEST_DATA"])
SCHEMES = ["fp8_per_tensor", "fp8_per_token", "fp8_per_channel", "fp8_group128", "fp8_block128", "fp8_per_tensor_ue8m0",
           "fp8_per_token_ue8m0",
           "fp8_per_channel_ue8m0", "fp8_group128_ue8m0", "fp8_block128_ue8m0", "int8_per_token", "int8_per_channel", "int8_group128",
           "int4_group32", "int4_group32_zero", "int4_group64", "int4_group64_zero", "int4_group128", "int4_group128_zero", "mxfp8",
           "mxfp8_w8a16", "mxfp4", "mxfp4_w4a16", "mxfp4_w4a8", "mxfp4_fp8", "nvfp4", "nvfp4_w4a16", "w4a8_fp8", "w4a8_fp8_group32",
           "w4a8_int8",
           *(f"int4_group{group}{zero}_fp8" for group in (32, 64, 128) for zero in ("", "_zero"))]
# int4 weights: their group, and whether it has a zero point
INT4 = {"int4_group32": (32, False), "int4_group32_zero": (32, True), "int4_group64": (64, False), "int4_group64_zero": (64, True),
        "int4_group128": (128, False), "int4_group128_zero": (128, True), "w4a8_fp8": (128, False), "w4a8_fp8_group32": (32, False),
        "w4a8_int8": (128, False),
        **{f"int4_group{group}{'_zero' if zero else ''}_fp8": (group, zero) for group in (32, 64, 128) for zero in (False, True)}}
# The rows that a checkpoint states: type, group (0: one scale a token). Other schemes state none, or those of their weights.
ROWS = {"w4a8_fp8": ("float", 0), "w4a8_fp8_group32": ("float", 0), "w4a8_int8": ("int", 0), "mxfp4_w4a8": ("float", 32),
        "mxfp4_fp8": ("float", 128), "mxfp8": ("float", 32), **{name: ("float", 128) for name in INT4 if name.endswith("_fp8") and
                                                                name.startswith("int4")}}
# Schemes of weights alone whose groups fit the tiny checkpoint's rows of 32.
AS_STORED = ("int4_group32", "int4_group32_zero", "mxfp4_w4a16", "mxfp8_w8a16", "nvfp4_w4a16", "int8_per_channel", "fp8_per_channel")
failures = 0


def check(ok: bool, what: str) -> None:
    global failures
    if not ok:
        failures += 1
        print(f"FAILED: {what}")


def load(path: pathlib.Path) -> dict[str, tuple[str, list[int], bytes]]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + length])
    body = data[8 + length:]
    return {name: (t["dtype"], t["shape"], body[slice(*t["data_offsets"])]) for name, t in header.items() if name != "__metadata__"}


def floats(tensor: tuple[str, list[int], bytes]) -> list[float]:
    dtype, _, raw = tensor
    if dtype == "BF16":
        return [struct.unpack("<f", b"\0\0" + raw[i:i + 2])[0] for i in range(0, len(raw), 2)]
    return list(struct.unpack(f"<{len(raw) // 4}f", raw))


def moe(*args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([TOOL, "quantize", *map(str, args)], capture_output=True, text=True, check=False)


def e2m1_table() -> list[float]:
    return [0, .5, 1, 1.5, 2, 3, 4, 6, -0.0, -.5, -1, -1.5, -2, -3, -4, -6]


def tensors(folder: pathlib.Path) -> None:
    """(scheme, file, input tensor, {output: reference tensor})"""
    fp8 = "weight_fp8_int8_200x300_seed2013"
    cases = [
        ("fp8_per_token", "act_f32_seed2001", "x", "per_token", True),
        ("fp8_per_token_ue8m0", "act_f32_seed2001", "x", "per_token_ue8m0", True),
        ("fp8_group128", "act_f32_seed2001", "x", "group128", True),
        ("fp8_group128_ue8m0", "act_f32_seed2001", "x", "group128_ue8m0", True),
        ("int8_per_token", "act_f32_seed2001", "x", "int8_per_token", True),
        ("fp8_per_token", "act_bf16_seed2001", "x", "per_token", False),
        ("fp8_group128_ue8m0", "act_bf16_seed2001", "x", "group128_ue8m0", False),
        ("int8_per_token", "act_bf16_seed2001", "x", "int8_per_token", False),
        ("fp8_block128", fp8, "w", "block128", True),
        ("fp8_block128_ue8m0", fp8, "w", "block128_ue8m0", True),
        ("fp8_per_channel", fp8, "w", "fp8_per_channel", True),
        ("int8_per_channel", fp8, "w", "int8_per_channel", True),
        ("fp8_block128", "weight_fp8_block_256x512_seed2011", "w", "block128", True),
        ("fp8_block128_ue8m0", "weight_fp8_block_256x512_seed2011", "w", "block128_ue8m0", True),
    ]
    out = folder / "out.safetensors"
    for scheme, name, tensor, prefix, has_dq in cases:
        source = GOLDEN / "quant" / f"{name}.safetensors"
        if not source.exists():
            continue  # the selection in tests/data leaves the large files out
        done = moe("--scheme", scheme, "--input", source, "--tensor", tensor, "--output", out)
        check(done.returncode == 0, f"{scheme} of {name}: {done.stderr}")
        got, want = load(out), load(source)
        for part in ["q", "scale"] + (["dq"] if has_dq else []) + (["scale_byte"] if "ue8m0" in scheme else []):
            check(got[part] == want[f"{prefix}.{part}"], f"{scheme} of {name}: {part}")

    source = GOLDEN / "quant" / "weight_int4_g128_64x512_seed2021.safetensors"
    moe("--scheme", "int4_group128", "--input", source, "--tensor", "w", "--output", out)
    got, want = load(out), load(source)
    for part, reference in {"q": "q", "scale": "scale", "packed": "packed_offset8"}.items():
        check(got[part] == want[reference], f"int4_group128: {part}")
    check(floats(got["dq"]) == floats(want["dq"]), "int4_group128: dq")

    # Every other int4 form from its definition: the zero point, the scale, and no element further off than half a step.
    x = floats(load(source)["w"])
    for scheme, (group, zero_points) in INT4.items():
        done = moe("--to", scheme, "--input", source, "--tensor", "w", "--output", out)
        check(done.returncode == 0, f"{scheme}: {done.stderr}")
        got = load(out)
        scales, dq = floats(got["scale"]), floats(got["dq"])
        check(got["scale"][1] == [64, 512 // group] and ("zero_point" in got) == zero_points, f"{scheme}: {got['scale'][1]}")
        signed = [code - 256 * (code > 127) for code in got["q"][2]]
        for g, scale in enumerate(scales):
            part, codes = x[g * group:(g + 1) * group], signed[g * group:(g + 1) * group]
            zero = got["zero_point"][2][g] if zero_points else 0
            low, high = min(0, *part), max(0, *part)
            step = max(high - low, 1e-10) / 15 if zero_points else max(1e-10, *map(abs, part)) / 7  # the floor of an empty group
            right = math.isclose(scale, step, rel_tol=1e-6) and (not zero_points or abs(zero + low / scale) < .501)
            in_range = all(0 <= c <= 15 if zero_points else -7 <= c <= 7 for c in codes)
            error = max(abs(a - b) for a, b in zip(part, dq[g * group:(g + 1) * group]))
            check(right and in_range and error <= .5001 * scale, f"{scheme}: group {g}: scale {scale}, {step}, zero {zero}, error {error}")
            check(all(math.isclose((c - zero) * scale, d, rel_tol=1e-6) for c, d in zip(codes, dq[g * group:(g + 1) * group])),
                  f"{scheme}: dq of group {g}")
        nibbles = [byte >> shift & 15 for byte in got["packed"][2] for shift in (0, 4)]
        check(nibbles == [c if zero_points else c + 8 for c in signed], f"{scheme}: packed")

    source = GOLDEN / "quant" / "mxfp4_quant_ocp_seed2031.safetensors"
    moe("--scheme", "mxfp4", "--input", source, "--tensor", "x", "--output", out)
    got, want = load(out), load(source)
    for part, reference in {"q": "codes", "scale_byte": "scale_byte", "packed": "packed", "dq": "dq"}.items():
        check(got[part] == want[reference], f"mxfp4: {part}")
    moe("--scheme", "mxfp4", "--mx-rule", "ceil", "--input", source, "--tensor", "x", "--output", out)
    check(load(out)["scale_byte"] != want["scale_byte"], "mxfp4: --mx-rule must matter")

    source = GOLDEN / "quant" / "nvfp4_seed2041.safetensors"
    moe("--scheme", "nvfp4", "--input", source, "--tensor", "w", "--output", out)
    got, want = load(out), load(source)
    for part, reference in {"q": "codes", "block_scale_e4m3": "block_scale_e4m3", "packed": "packed", "dq": "dq",
                            "global_scale": "global_scale"}.items():
        check(got[part] == want[reference], f"nvfp4: {part}")
    dq, scale = floats(got["dq"]), floats(got["scale"])
    check(all(math.isclose(dq[i], e2m1_table()[code] * scale[i // 16], rel_tol=1e-6) for i, code in enumerate(got["q"][2])),
          "nvfp4: dq is value(q) times scale")

    for scheme in ["fp8_per_tensor", "fp8_per_tensor_ue8m0", "fp8_per_channel_ue8m0", "int8_group128", "mxfp8"]:
        done = moe("--scheme", scheme, "--input", source, "--tensor", "w", "--output", out, "--json")
        report = json.loads(done.stdout)
        check(done.returncode == 0 and report["rms_relative_error"] < 0.08, f"{scheme}: {done.stdout} {done.stderr}")
        check(load(out)["scale"][1] == report["scale_shape"], f"{scheme}: scale shape")


def checkpoints(folder: pathlib.Path) -> None:
    source = GOLDEN / "checkpoints" / "qwen3_moe_tiny"
    original = {}
    for shard in source.glob("model*.safetensors"):
        original.update(load(shard))
    experts = [name for name in original if ".experts." in name]
    for scheme, bound in {"fp8_block128": .04, "fp8_per_channel": .04, "fp8_per_tensor": .04, "int8_per_channel": .01,
                          **dict.fromkeys(INT4, .15), "mxfp8": .04, "mxfp8_w8a16": .04, "mxfp4": .2, "mxfp4_w4a16": .2, "mxfp4_w4a8": .2,
                          "mxfp4_fp8": .2,
                          "nvfp4": .15, "nvfp4_w4a16": .15}.items():
        out = folder / scheme
        done = moe("--scheme", scheme, "--input", source, "--output", out)
        check(done.returncode == 0, f"{scheme}: {done.stderr}")
        written, index = {}, json.loads((out / "model.safetensors.index.json").read_text())
        for shard in out.glob("model*.safetensors"):
            in_shard = load(shard)
            check(all(index["weight_map"][name] == shard.name for name in in_shard), f"{scheme}: index of {shard.name}")
            written.update(in_shard)
        check(set(index["weight_map"]) == set(written), f"{scheme}: index is complete")
        check(index["metadata"]["total_size"] == sum(len(t[2]) for t in written.values()), f"{scheme}: total size")
        check(all(written[name] == t for name, t in original.items() if name not in experts), f"{scheme}: other tensors are untouched")
        layer = subprocess.run([TOOL, "layer", "--checkpoint", out, "--layer", "1", "--input", source / "moe_io.safetensors", "--tensor",
                                "layers.1.moe_in", "--output", folder / "y.safetensors", "--json", "--expected",
                                f"{source / 'moe_io.safetensors'}:layers.1.moe_out_f32"], capture_output=True, text=True, check=False)
        check(layer.returncode == 0 and 1e-4 < json.loads(layer.stdout)["error"] < 3 * bound,
              f"{scheme}: moe layer: {layer.stdout} {layer.stderr}")
        if scheme in AS_STORED:  # the layer in the checkpoint's scheme computes with the checkpoint's codes
            again = subprocess.run([TOOL, "layer", "--checkpoint", out, "--layer", "1", "--input", source / "moe_io.safetensors",
                                    "--tensor", "layers.1.moe_in", "--output", folder / "again.safetensors", "--json", "--quantization",
                                    scheme, "--expected", f"{folder / 'y.safetensors'}:output"],
                                   capture_output=True, text=True, check=False)
            check(again.returncode == 0 and json.loads(again.stdout)["error"] < 2e-6, f"{scheme} as stored: {again.stdout} {again.stderr}")
        config = json.loads((out / "config.json").read_text())
        check("quantization_config" in config and (out / "generation_config.json").exists(), f"{scheme}: config")
        stated = (config["quantization_config"].get("config_groups") or {}).get("group_0", {})
        if scheme in ROWS or scheme in INT4 or scheme.startswith(("mxfp4", "mxfp8_w", "nvfp4")):
            found = stated["input_activations"]
            kind = found and (found["type"], found.get("group_size", 0))
            check(kind == ROWS.get(scheme) and stated["weights"]["symmetric"] != INT4.get(scheme, (0, False))[1],
                  f"{scheme}: stated {stated}")
        for name in experts[:6]:
            base, (_, (rows, cols), _) = name.removesuffix(".weight"), original[name]
            x = floats(original[name])
            if scheme in INT4:
                packed, scales = written[base + ".weight_packed"], floats(written[base + ".weight_scale"])
                check(packed[0] == "I32" and packed[1] == [rows, cols // 8], f"{scheme}: packed shape of {name}")
                check(struct.unpack("<2q", written[base + ".weight_shape"][2]) == (rows, cols), f"{scheme}: weight_shape of {name}")
                group = config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"]
                check(group == min(INT4[scheme][0], 32), f"{scheme}: groups of {group}")  # down_proj has 32 columns
                zeros = [8] * len(scales)
                if INT4[scheme][1]:  # eight rows in a word
                    dtype, shape, words = written[base + ".weight_zero_point"]
                    check((dtype, shape) == ("I32", [rows // 8, cols // group]), f"{scheme}: zero points of {name}: {dtype} {shape}")
                    words = struct.unpack(f"<{len(words) // 4}I", words)
                    zeros = [words[(n // 8) * (cols // group) + g] >> 4 * (n % 8) & 15 for n in range(rows) for g in range(cols // group)]
                check((base + ".weight_zero_point" in written) == INT4[scheme][1], f"{scheme}: zero points")
                codes = [byte >> shift & 15 for byte in packed[2] for shift in (0, 4)]
                dq = [(q - zeros[i // group]) * scales[i // group] for i, q in enumerate(codes)]
            elif scheme.startswith("mxfp8"):
                code, stored = written[name], written[base + ".weight_scale"]
                check(code[:2] == ("F8_E4M3", [rows, cols]) and stored[:2] == ("U8", [rows, cols // 32]), f"{scheme}: {name}")
                dq = [e4m3(c) * 2.0**(stored[2][i // 32] - 127) for i, c in enumerate(code[2])]
            elif scheme.startswith(("mxfp4", "nvfp4")):
                mx = scheme.startswith("mx")
                packed, stored, group = written[base + ".weight_packed"], written[base + ".weight_scale"], 32 if mx else 16
                check(packed[:2] == ("U8", [rows, cols // 2]) and stored[:2] == ("U8" if mx else "F8_E4M3", [rows, cols // group]),
                      f"{scheme}: {name} {packed[:2]} {stored[:2]}")
                divisor = 1 if mx else floats(written[base + ".weight_global_scale"])[0]
                scales = [2.0**(b - 127) if mx else e4m3(b) / divisor for b in stored[2]]
                dq = [e2m1_table()[byte >> shift & 15] * scales[(2 * i + (shift > 0)) // group] for i, byte in enumerate(packed[2])
                      for shift in (0, 4)]
            else:
                code, suffix = written[name], ".weight_scale_inv" if scheme == "fp8_block128" else ".weight_scale"
                check(code[0] == ("I8" if scheme.startswith("int8") else "F8_E4M3") and code[1] == [rows, cols], f"{scheme}: {name}")
                scales = floats(written[base + suffix])
                check(len(scales) == (rows if "channel" in scheme else 1), f"{scheme}: scales of {name}")
                value = (lambda b: b - 256 if b > 127 else b) if scheme.startswith("int8") else e4m3
                dq = [value(b) * scales[i // cols if "channel" in scheme else 0] for i, b in enumerate(code[2])]
            error = math.sqrt(sum((a - b)**2 for a, b in zip(x, dq)) / sum(a * a for a in x))
            check(error < bound, f"{scheme}: {name} differs by {error}")
    for rule, same in (("ocp", True), ("ceil", False)):
        done = moe("--scheme", "mxfp4", "--mx-rule", rule, "--input", source, "--output", folder / rule)
        check(done.returncode == 0, f"mxfp4 with {rule}: {done.stderr}")
        equal = all(load(path) == load(folder / "mxfp4" / path.name) for path in (folder / rule).glob("model*.safetensors"))
        check(equal == same, f"mxfp4: the default rule is ocp, written with {rule} it is {'the same' if equal else 'another file'}")
    again = moe("--scheme", "fp8_block128", "--input", folder / "fp8_block128", "--output", folder / "again")
    check(again.returncode == 1 and "quantised already" in again.stderr, again.stderr)
    exists = moe("--scheme", "fp8_block128", "--input", source, "--output", folder / "fp8_block128")
    check(exists.returncode == 1 and "exists already" in exists.stderr, exists.stderr)
    loop = folder / "loop"
    loop.mkdir()
    (loop / "model.safetensors.index.json").symlink_to("model.safetensors.index.json")
    unread = moe("--scheme", "mxfp4", "--input", loop, "--output", folder / "of_loop")
    check(unread.returncode == 1 and f"E_ARG: cannot read '{loop}/model" in unread.stderr, unread.stderr)
    linked = folder / "linked"
    shutil.copytree(source, linked)
    (linked / "tokenizer.json").symlink_to("tokenizer.json")
    beside = moe("--scheme", "mxfp4", "--input", linked, "--output", folder / "of_linked")
    check(beside.returncode == 0 and not (folder / "of_linked" / "tokenizer.json").exists(), f"a link to itself: {beside.stderr}")
    single = moe("--scheme", "fp8_block128", "--input", GOLDEN / "checkpoints" / "deepseek_v3_tiny", "--output", folder / "deepseek/")
    check(single.returncode == 0 and (folder / "deepseek" / "model.safetensors").exists(), single.stderr)
    check(not list(folder.glob("*.partial-*")), "a partial directory is left")


def halves_of_one_matrix(folder: pathlib.Path) -> None:
    """nvfp4: gate and up of an expert are what their two matrices are as one, so that both have one global scale."""
    source, out = GOLDEN / "checkpoints" / "qwen3_moe_tiny", folder / "halves"
    done = moe("--scheme", "nvfp4", "--input", source, "--output", out)
    check(done.returncode == 0, f"halves: {done.stderr}")
    original, written = {}, {}
    for shard in source.glob("model*.safetensors"):
        original.update(load(shard))
        written.update(load(out / shard.name))
    for expert in ("model.layers.0.mlp.experts.0.", "model.layers.1.mlp.experts.7."):
        gate, up = (original[expert + half + "_proj.weight"] for half in ("gate", "up"))
        both, one = folder / "both.safetensors", folder / "one.safetensors"
        write(both, {"w": (gate[0], [gate[1][0] + up[1][0], gate[1][1]], gate[2] + up[2])})
        moe("--scheme", "nvfp4", "--input", both, "--tensor", "w", "--output", one)
        want = load(one)
        for part, reference in (("packed", "packed"), ("scale", "block_scale_e4m3")):
            got = b"".join(written[f"{expert}{half}_proj.weight_{part}"][2] for half in ("gate", "up"))
            check(got == want[reference][2], f"halves: {expert} {part}")
        divisors = [floats(written[f"{expert}{half}_proj.weight_global_scale"])[0] for half in ("gate", "up")]
        check(divisors[0] == divisors[1] and abs(divisors[0] * floats(want["global_scale"])[0] - 1) < 1e-6, f"halves: {expert} {divisors}")


def e4m3(code: int) -> float:
    sign, exponent, fraction = -1 if code & 128 else 1, code >> 3 & 15, code & 7
    return sign * (fraction / 512 if exponent == 0 else (1 + fraction / 8) * 2.0**(exponent - 7))


def save(path: pathlib.Path, tensors: dict[str, tuple[list[int], list[float]]]) -> None:
    header, body = {}, b""
    for name, (shape, numbers) in tensors.items():
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(body), len(body) + 4 * len(numbers)]}
        body += struct.pack(f"<{len(numbers)}f", *numbers)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def unusual_checkpoints(folder: pathlib.Path) -> None:
    source = folder / "unusual"
    source.mkdir()
    (source / "config.json").write_text((GOLDEN / "checkpoints" / "qwen3_moe_tiny" / "config.json").read_text())
    expert, matrix = "model.layers.0.mlp.experts.1.up_proj.weight", ([4, 128], [.5] * 512)
    # Expert names are recognised in one pass over the name, of any length.
    long = {"a" * 58500: matrix, "b" * 58500 + ".experts.0.up_proj.weight": matrix}
    others = {f"model.{name}.weight": matrix for name in ("experts.up_proj", "experts.x.up_proj", "experts.1.up-proj", "xperts.1.up_proj")}
    save(source / "model.safetensors", {expert: matrix, **long, **others})
    done = moe("--scheme", "fp8_block128", "--input", source, "--output", folder / "long")
    check(done.returncode == 0, f"long names: {done.returncode} {done.stderr[:300]}")
    if done.returncode == 0:
        scaled = [name for name in load(folder / "long" / "model.safetensors") if name.endswith("_scale_inv")]
        check(sorted(scaled) == sorted(name + "_scale_inv" for name in [expert, list(long)[1]]),
              f"other experts: {[n[-80:] for n in scaled]}")
    for value in (math.nan, math.inf, -math.inf):
        for scheme in ("fp8_block128", "fp8_per_channel", "int4_group128", "mxfp4", "nvfp4"):
            save(source / "model.safetensors", {expert: (matrix[0], [*matrix[1][:131], value, *matrix[1][132:]])})
            done = moe("--scheme", scheme, "--input", source, "--output", folder / "never")
            check(done.returncode == 1 and expert in done.stderr and f"element [1, 3] is {value}, expected a finite number" in done.stderr,
                  f"{value} as {scheme}: {done.returncode} {done.stderr}")
            check(not list(folder.glob("never*")), f"{value} as {scheme}: a directory is left")


def bad_input(folder: pathlib.Path) -> None:
    source, out = GOLDEN / "quant" / "nvfp4_seed2041.safetensors", folder / "bad.safetensors"
    save(folder / "nan.safetensors", {"w": ([2, 2, 64], [1.0] * 200 + [math.nan] + [1.0] * 55), "v": ([64], [math.inf] + [1.0] * 63)})
    copy, checkpoint, dangling = folder / "copy.safetensors", GOLDEN / "checkpoints" / "qwen3_moe_tiny", folder / "dangling"
    shutil.copy(source, copy)
    (folder / "link.safetensors").symlink_to(copy)
    dangling.symlink_to(folder / "nothing")
    cases = [
        *((1, "element [1, 1, 8] is nan, expected a finite number", ["--scheme", name, "--input", folder / "nan.safetensors", "--tensor",
                                                                     "w", "--output", out]) for name in SCHEMES),
        (1, "(F32 [64]): element [0] is inf", ["--scheme", "fp8_per_tensor", "--input", folder / "nan.safetensors", "--tensor", "v",
                                               "--output", out]),
        (2, "only mxfp8 and mxfp4 take it, not nvfp4", ["--scheme", "nvfp4", "--mx-rule", "ocp", "--input", source, "--tensor", "w",
                                                        "--output", out]),
        (2, "only mxfp8 and mxfp4 take it, not fp8_block128", ["--scheme", "fp8_block128", "--mx-rule", "ocp", "--input",
                                                               GOLDEN / "checkpoints" / "qwen3_moe_tiny", "--output", folder / "x"]),
        (1, "is the input file", ["--scheme", "mxfp4", "--input", copy, "--tensor", "w", "--output", copy]),
        (1, "is the input file", ["--scheme", "mxfp4", "--input", folder / "link.safetensors", "--tensor", "w", "--output", copy]),
        (1, "is the input file", ["--scheme", "mxfp4", "--input", copy, "--tensor", "w", "--output", folder / "link.safetensors"]),
        (1, "is a symbolic link", ["--scheme", "mxfp4", "--input", source, "--tensor", "w", "--output", folder / "link.safetensors"]),
        (1, "exists already", ["--scheme", "fp8_block128", "--input", checkpoint, "--output", dangling]),
        *((2, name, ["--scheme", "fp9", "--input", source, "--tensor", "w", "--output", out]) for name in SCHEMES),
        (2, "--tensor", ["--scheme", "mxfp4", "--input", source, "--output", out]),
        (2, "one of fp8_block128", ["--scheme", "fp8_group128", "--input", GOLDEN / "checkpoints" / "qwen3_moe_tiny", "--output", out]),
        (1, "nothing", ["--scheme", "mxfp4", "--input", source, "--tensor", "nothing", "--output", out]),
        (1, "floating-point", ["--scheme", "mxfp4", "--input", source, "--tensor", "codes", "--output", out]),
        (1, "absent.safetensors", ["--scheme", "mxfp4", "--input", folder / "absent.safetensors", "--tensor", "w", "--output", out]),
        (1, "no/such", ["--scheme", "mxfp4", "--input", source, "--tensor", "w", "--output", folder / "no/such/out.safetensors"]),
        (1, "config", ["--scheme", "fp8_block128", "--input", folder, "--output", folder / "x"]),
    ]
    for code, words, args in cases:
        done = moe(*args)
        check(done.returncode == code, f"{args}: exit code {done.returncode}, expected {code}: {done.stderr}")
        if words != "config":
            check(words in done.stderr, f"{args}: '{words}' is not in {done.stderr}")
        check(done.stderr.count("\n") == 1, f"{args}: not one line: {done.stderr}")
    check(not out.exists(), "a failed run left a file")
    check(copy.read_bytes() == source.read_bytes(), "an input was written")
    check((folder / "link.safetensors").is_symlink() and dangling.is_symlink(), "a link was replaced")


def incomplete_checkpoints(folder: pathlib.Path) -> None:
    """An expert's tensor that is missing from the index, from its shard, or from both; the parents of an output that does not come
    about."""
    source, lost = GOLDEN / "checkpoints" / "qwen3_moe_tiny", "model.layers.1.mlp.experts.3.up_proj.weight"
    for name, from_index, from_shard, words in (
        ("index", True, False, "the index of the checkpoint does not have it"),
        ("shard", False, True, f"tensor '{lost}' is missing"),
        ("both", True, True, "'model.layers.1.mlp.experts': 8 experts have down_proj, 7 have up_proj"),
    ):
        copy = folder / f"without_{name}"
        shutil.copytree(source, copy)
        path = copy / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        shard = copy / index["weight_map"][lost]
        if from_index:
            del index["weight_map"][lost]
            path.write_text(json.dumps(index))
        if from_shard:
            contents, metadata = read(shard)
            del contents[lost]
            write(shard, contents, metadata)
        done = moe("--scheme", "fp8_per_channel", "--input", copy, "--output", folder / f"parent_{name}" / "deeper" / "out")
        check(done.returncode == 1 and words in done.stderr, f"without {name}: {done.returncode} {done.stderr}")
        check(not (folder / f"parent_{name}").exists(), f"without {name}: a failed run left its output's parents")


with tempfile.TemporaryDirectory() as name:
    tensors(pathlib.Path(name))
    incomplete_checkpoints(pathlib.Path(name))
    checkpoints(pathlib.Path(name))
    halves_of_one_matrix(pathlib.Path(name))
    unusual_checkpoints(pathlib.Path(name))
    bad_input(pathlib.Path(name))
print(f"{failures} failures")
sys.exit(1 if failures else 0)
