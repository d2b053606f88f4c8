# SPDX-License-Identifier: Apache-2.0
# tests/tool/bad_inputs.py: files, configurations and arguments that `moe` refuses, for the tests that run it on them.
import json
import math
import os
import pathlib
import shutil
import struct

from tool import DATA, TOOL, raw, read, values, write

BLOCK = sorted((DATA / "moe_blocks").glob("mixtral_e8k2*.safetensors"))[0]
QWEN = DATA / "checkpoints" / "qwen3_moe_tiny"
# Refused when the weights are read, which on a device is after its selection.
WEIGHTS = ("wrong_dtype", "missing_expert", "missing_router", "transposed_expert", "nan_logits", "hash_table_with_expert_8",
           "hash_table_with_expert_-1", "expert_norm_missing", "expert_norm_of_another_width", "expert_norm_without_eps",
           "input_norm_missing", "lost_shard", "cut_shard", "ranks_read_other_weights")
cases = []  # (name, arguments without --output, parts of the message, ranks, exit code)


def bad(name, arguments, *parts, ranks=(1, 3), code=1):
    cases.extend((name, arguments, parts, n, code) for n in ranks)


def files(folder):
    """safetensors files that are broken as files."""
    whole = BLOCK.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    header = json.loads(whole[8:8 + length])

    def block(name, contents, *parts):
        path = folder / f"{name}.safetensors"
        path.write_bytes(contents)
        bad(name, ["block", path], path.name, *parts)

    def with_header(name, change, *parts):
        changed = json.loads(json.dumps(header))
        change(changed)
        text = json.dumps(changed).encode()
        block(name, struct.pack("<Q", len(text)) + text + whole[8 + length:], *parts)

    block("empty", b"", "0 bytes")
    block("four_bytes", whole[:4], "4 bytes")
    block("cut_in_header", whole[:8 + length // 2], f"header length {length}")
    block("cut_in_data", whole[:-100], f"end after the file's {len(whole) - 8 - length - 100} data bytes")
    block("trailing", whole + b"1234567", f"of {len(whole) - 8 - length + 7} data bytes")
    block("oversized_header", struct.pack("<Q", 1 << 62) + whole[8:], str(1 << 62))
    block("header_over_the_limit", struct.pack("<Q", 100_000_001) + whole[8:], "100000001")
    bad("no_safetensors", ["layer", "--checkpoint", QWEN, "--layer", 0, "--input", QWEN / "config.json", "--tensor", "hidden"],
        "config.json", "no safetensors file", ranks=(1,))
    block("not_json", struct.pack("<Q", length) + b"{" * length + whole[8 + length:], "JSON")
    block("no_object", struct.pack("<Q", length) + b"x" * length + whole[8 + length:], "does not begin with")
    first, second = sorted((n for n in header if n != "__metadata__"), key=lambda n: header[n]["data_offsets"])[:2]
    begin, end = header[second]["data_offsets"]
    with_header("overlapping", lambda h: h[second].update(data_offsets=[begin - 4, end - 4]), second, first,
                f"begins at data byte {begin - 4}", f"ends at {begin}")
    with_header("beyond_the_end", lambda h: h["hidden"].update(data_offsets=[1 << 40, (1 << 40) + 4]), "hidden", str(1 << 40))
    with_header("backwards", lambda h: h["hidden"].update(data_offsets=h["hidden"]["data_offsets"][::-1]), "hidden")
    with_header("shape_does_not_fit", lambda h: h["hidden"].update(shape=[h["hidden"]["shape"][0] + 1, 64]), "hidden",
                f"[{header['hidden']['shape'][0] + 1}, 64]")
    with_header("shape_overflows", lambda h: h["hidden"].update(shape=[1 << 40, 1 << 40]), "hidden", str(1 << 40))
    with_header("negative_shape", lambda h: h["hidden"].update(shape=[-1, 64]), "hidden")
    with_header("unknown_dtype", lambda h: h["hidden"].update(dtype="F33"), "hidden", "F33")


def tensors(folder):
    """Sound files whose contents do not make a layer."""
    good, metadata = read(BLOCK)
    router = next(name for name in good if name.endswith("gate.weight"))
    expert = next(name for name in good if "experts.5." in name and name.endswith("w2.weight"))
    wide = good["hidden"][1]

    def block(name, change, *parts, options=()):
        changed = dict(good)
        data = dict(metadata)
        change(changed, data)
        path = folder / f"{name}.safetensors"
        write(path, changed, data)
        bad(name, ["block", path, *options], *parts)

    def as_i32(t, _):
        t[expert] = ("I32", *t[expert][1:])

    def value(tensor, index, number):
        def change(t, _):
            numbers = values(t[tensor])
            numbers[index] = number
            t[tensor] = (*t[tensor][:2], raw("f", numbers))
        return change

    block("wrong_dtype", as_i32, expert, "I32")
    block("hidden_of_integers", lambda t, _: t.update(hidden=("I32", *t["hidden"][1:])), "hidden", "I32")
    block("missing_expert", lambda t, _: t.pop(expert), "missing expert weights", "expert 5", expert)
    block("missing_router", lambda t, _: t.pop(router), f"no router weight under '{router.removesuffix('gate.weight')}'")
    block("missing_input", lambda t, _: t.pop("hidden"), "tensor 'hidden' is missing")
    block("transposed_expert", lambda t, _: t.update({expert: (t[expert][0], t[expert][1][::-1], t[expert][2])}), expert,
          str(good[expert][1][::-1]), "expected " + str(good[expert][1]))
    block("input_of_another_width", lambda t, _: t.update(hidden=("F32", [wide[0] * 2, wide[1] // 2], t["hidden"][2])), "hidden",
          f"[tokens, {wide[1]}]")
    block("nan_in_hidden", value("hidden", 3, math.nan), "hidden", "row 0, column 3 is nan", "finite")
    last = wide[0] * wide[1] - 1
    block("infinity_in_hidden", value("hidden", last, math.inf), "hidden", f"row {wide[0] - 1}, column 63 is inf")
    # inf - inf for one expert of every row: the logits are NaN
    block("nan_logits", lambda t, _: t.update({router: (*t[router][:2], raw("f", values(t[router])[:2 * 64] + [math.inf, -math.inf] * 32 +
                                                                            values(t[router])[3 * 64:]))}), "expert 2 is NaN")
    block("no_such_field", lambda _, m: m.pop("num_experts"), "num_experts", "missing")
    block("no_experts", lambda _, m: m.update(num_experts="0"), "num_experts", "0")
    block("many_experts", lambda _, m: m.update(num_experts="1" + "0" * 30), "num_experts")
    block("topk_above_experts", lambda _, m: m.update(top_k="9"), "9", "8")
    block("unknown_family", lambda _, m: m.update(scoring_func="cosine"), "cosine")

    hash_block = next(iter(sorted((DATA / "moe_blocks").glob("deepseek_v4_hash*"))), None)
    if hash_block:  # only in the complete reference data
        good, metadata = read(hash_block)
        table = next(name for name in good if name.endswith("tid2eid"))

        def table_id(number):
            def change(t, _):
                t.clear()
                t.update(good)
                entries = values(good[table])
                entries[7] = number
                t[table] = (*good[table][:2], raw("q", entries))
            return change

        block("hash_table_with_expert_8", table_id(8), table, "expert 8 is out of range [0, 8)")
        block("hash_table_with_expert_-1", table_id(-1), table, "expert -1 is out of range [0, 8)")
        block("no_token_ids", lambda t, _: (t.clear(), t.update(good), t.pop("input_ids")), "input_ids")

    # a block whose experts' outputs are normalised
    good, metadata = read(next((pathlib.Path(os.environ["MOE_TEST_DATA"]) / "moe_blocks").glob("muse_spark_text_*")))
    norm = next(name for name in good if name.endswith("experts.post_expert_norm.weight"))
    into = next(name for name in good if name.endswith("pre_expert_norm.weight"))
    width = good[norm][1][0]
    block("expert_norm_missing", lambda t, _: t.pop(norm), "E_ARG", f"tensor '{norm}' is missing")
    block("expert_norm_of_another_width", lambda t, _: t.update({norm: ("F32", [2, width // 2], t[norm][2])}), "E_ARG", norm,
          f"shape [2, {width // 2}], expected [{width}]")
    block("expert_norm_without_eps", lambda _, m: m.update(expert_norm_eps="0"), "norm: eps 0 is not above 0")
    block("expert_norm_of_unknown_form", lambda _, m: m.update(expert_output_norm="layernorm"), "expert_output_norm", "layernorm")
    block("input_norm_missing", lambda t, _: t.pop(into), "E_ARG", f"tensor '{into}' is missing")


def checkpoints(folder):
    io = QWEN / "moe_io.safetensors"

    def layer(checkpoint, number=0):
        return ["layer", "--checkpoint", checkpoint, "--layer", number, "--input", io, "--tensor", "layers.0.moe_in"]

    def config(name, change, *parts):
        copy = folder / name
        copy.mkdir()
        for path in QWEN.iterdir():
            if path.name != "config.json":
                (copy / path.name).symlink_to(path)
        fields = json.loads((QWEN / "config.json").read_text())
        text = change(fields)
        (copy / "config.json").write_text(text if isinstance(text, str) else json.dumps(fields))
        bad(name, layer(copy), "config.json", *parts)

    config("config_without_topk", lambda c: c.pop("num_experts_per_tok") and None, "num_experts_per_tok", "missing")
    config("config_without_norm", lambda c: c.pop("norm_topk_prob") and None, "norm_topk_prob", "missing")
    config("config_with_negative_experts", lambda c: c.update(num_experts=-8), "num_experts", "-8")
    config("config_with_2_to_the_40_experts", lambda c: c.update(num_experts=1 << 40), "num_experts", str(1 << 40))
    config("config_with_text", lambda c: c.update(hidden_size="wide"), "hidden_size", "wide")
    config("config_with_topk_9", lambda c: c.update(num_experts_per_tok=9), "9", "8")
    config("config_of_unknown_model", lambda c: c.update(model_type="llama"), "llama", "qwen3_moe")
    config("config_cut", lambda c: json.dumps(c)[:100], "JSON")
    config("config_with_biases", lambda c: c.update(mlp_bias=True), "mlp_bias is true, and experts of qwen3_moe have no biases")

    bad("layer_99", layer(QWEN, 99), "layer 99 is out of range [0, 2)")
    bad("layer_-1", layer(QWEN, -1), "layer -1 is out of range [0, 2)")
    bad("layer_x", layer(QWEN, "x"), '--layer: "x", expected a whole number from 0 to ', code=2)
    bad("layer_empty", layer(QWEN, ""), "--layer", '""', code=2)
    bad("layer_of_many_digits", layer(QWEN, "9" * 20), "--layer", "9" * 20, code=2)
    bad("checkpoint_is_a_file", layer(QWEN / "config.json"), str(QWEN / "config.json"), "is not a directory")
    bad("checkpoint_is_a_device", layer("/dev/null"), "--checkpoint '/dev/null' is not a directory", ranks=(1,))
    bad("no_checkpoint", layer(folder / "nothing"), "nothing")
    index = folder / "cut_index" / "model.safetensors.index.json"
    shutil.copytree(QWEN, index.parent)
    index.write_text('{"weight_map": {')
    quantize = ["quantize", "--to", "int4_group32", "--input", index.parent]
    for command in (layer(index.parent), quantize):
        bad(f"cut_index_of_{command[0]}", command, f"moe: E_ARG: '{index}' is not valid JSON at byte 17", ranks=(1,))
    bad("no_input", layer(QWEN)[:5] + ["--input", folder / "nothing", "--tensor", "hidden"], "nothing", "No such file")
    bad("no_such_tensor", layer(QWEN)[:-1] + ["layers.7.moe_in"], "tensor 'layers.7.moe_in' is missing", "layers.0.moe_in")
    lost = folder / "lost_shard"
    shutil.copytree(QWEN, lost)
    (lost / "model-00002-of-00003.safetensors").unlink()
    bad("lost_shard", layer(lost), "model-00002-of-00003.safetensors")
    cut = folder / "cut_shard"
    shutil.copytree(QWEN, cut)
    shard = cut / "model-00003-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1000])
    bad("cut_shard", layer(cut, 1), shard.name)


def usage(folder):
    block = ["block", BLOCK]
    for option, code, known in (("--backend", 2, "all_to_all_v, allgather_reduce_scatter, naive, no_expert_parallel"),
                                ("--experts", 2, "onednn, reference, cuda_reference"),
                                ("--quantization", 2, "none, fp8_per_tensor, fp8_per_token"),
                                ("--device", 2, "host, cuda"), ("--deal", 2, "even, random"), ("--dual-batch", 2, "auto, on, off")):
        bad(f"unknown{option}", [*block, option, "sideways"], f'{option}: "sideways", expected one of ', *known.split(", "), code=code)
    bad("unknown--placement", [*block, "--placement", "lineer"], '--placement: "lineer", expected linear, round_robin, or a file of maps')
    bad("unknown_option", [*block, "--sideways"], "--sideways", code=2)
    maps = folder / "maps.json"
    layers = [[i % 8 for i in range(9)]] * 3
    maps.write_text(json.dumps({"models": {"main": {"num_logical": 8, "physical_to_logical": layers}}}))
    bad("maps_of_3_layers", [*block, "--placement", maps], f"{maps}: maps of 3 layers, expected those of 1", ranks=(3,))
    pipe = folder / "maps_pipe"
    os.mkfifo(pipe)
    bad("maps_in_a_pipe", [*block, "--placement", pipe], f"{pipe}: is not a regular file")
    bad("mistyped_option", ["plan", "--loads", "nofile", "--ranks", 4], 'unknown option "--loads"; options of plan: ', "--load,",
        ranks=(1,), code=2)
    bad("option_of_another_command", ["quantize", "--checkpoint", QWEN, "--scheme", "mxfp4"], 'unknown option "--checkpoint"', "--input",
        ranks=(1,), code=2)
    bad("empty_composition", ["check", ""], "the composition is empty, expected 5 names: Config, ", ranks=(0,), code=2)
    commands = ("layer", "block", "list", "plan", "quantize")
    bad("unknown_command", ["sideways"], 'subcommand "sideways"', *commands, code=2)
    bad("unknown_option_of_none", ["--sideways"], 'option "--sideways"', *commands, code=2)
    bad("many_digits", [*block, "--seed", "9" * 20], "--seed", "9" * 20, f"0 to {2**64 - 1}", code=2)
    bad("cuda_experts", [*block, "--experts", "hopper_contiguous"], "--experts hopper_contiguous needs --device cuda")
    bad("no_quantize_input", ["quantize", "--scheme", "mxfp4", "--input", folder / "nothing"], "nothing", "No such file", ranks=(1,))
    bad("unknown_list", ["list", "sideways"], "sideways", "backends", "compositions", ranks=(0,), code=2)
    for command in (["list", "experts"], ["plan", "--load", DATA / "eplb" / "readme_example.json", "--ranks", 4],
                    ["quantize", "--scheme", "fp8_block128", "--input", QWEN]):
        bad(f"many_ranks_{command[0]}", command, f"{command[0]}: runs on 1 rank", "is 3", ranks=(3,), code=2)
    bad("repeat_0", [*block, "--repeat", 0], '--repeat: "0", expected a whole number from 1 to 1000000', code=2)
    bad("no_file", ["block"], "file", code=2)
    bad("more_ranks_than_experts", block, "9 ranks for 8 experts: each rank needs at least one. Fix: mpirun -n 8, or --replicas 1",
        ranks=(9,))
    bad("uneven_slots", [*block, "--replicas", 2], "8 experts + 2 replicas on 3 ranks; nearest valid --replicas: 1 or 4", ranks=(3,))
    bad("many_ranks_without_exchange", [*block, "--backend", "no_expert_parallel"], "no_expert_parallel: the ranks hold different tokens",
        ranks=(3,))
    bad("expected_without_name", [*block, "--expected", "nothing"], '--expected: "nothing", expected FILE:NAME', code=2)
    bad("seed_below_0", [*block, "--deal", "random", "--seed", -1], "--seed", "-1", f"0 to {2**64 - 1}", code=2)
    bad("expected_missing", [*block, "--expected", f"{BLOCK}:nothing"], "tensor 'nothing' is missing")
    bad("expected_of_another_shape", [*block, "--expected", f"{BLOCK}:router_logits"], "router_logits", "expected [tokens, 64]")
    bad("no_folder", [*block, "--output", folder / "nothing" / "out.safetensors"], str(folder / "nothing" / "out.safetensors"),
        "No such file")
    bad("output_is_a_folder", [*block, "--output", folder], str(folder), "is a directory")
    a_tensor, plan = "the name of a tensor", ["plan", "--load", DATA / "eplb" / "readme_example.json", "--ranks", 4]
    for option, expected in (("--output", "a file to write"), ("--input", "a file"), ("--tensor", a_tensor), ("--token-ids", a_tensor),
                             ("--dual-batch", "one of auto, on, off")):
        bad(f"empty{option}", [*block, option, ""], f'{option}: "", expected {expected}', code=2)
    bad("empty_file", ["block", ""], 'file: "", expected a file', code=2)
    for number, (option, expected) in enumerate((("--checkpoint", "a directory"), ("--input", "a file"), ("--tensor", a_tensor))):
        given = ["--checkpoint", QWEN, "--input", QWEN / "moe_io.safetensors", "--tensor", "layers.0.moe_in"]
        given[2 * number + 1] = ""
        bad(f"empty{option}_of_layer", ["layer", "--layer", 0, *given], f'{option}: "", expected {expected}', ranks=(1,), code=2)
    bad("empty_model", [*plan, "--model", ""], '--model: "", expected the name of a model', ranks=(1,), code=2)
    bad("empty_load", ["plan", "--load", "", "--ranks", 4], '--load: "", expected a file', ranks=(1,), code=2)
    bad("empty_quantize_tensor", ["quantize", "--to", "mxfp4", "--input", QWEN, "--tensor", ""], f'--tensor: "", expected {a_tensor}',
        ranks=(1,), code=2)
    bad("option_without_value", [*block, "--seed"], "--seed: no value before --output, expected UINT", code=2)
    bad("last_option_without_value", ["plan", "--load", BLOCK, "--ranks"], "--ranks: no value, expected INT", ranks=(1,), code=2)
    bad("option_twice", [*block, "--deal", "even", "--deal", "random"], "--deal: given 2 times, expected once", code=2)
    bad("flag_with_value", [*block, "--nvtx=abc"], '--nvtx: "abc", expected no value, true or false', code=2)
    bad("second_file", [*block, "other"], 'unexpected argument "other"; block takes options and, once: file', code=2)
    bad("word_without_option", [*plan, "other"], 'unexpected argument "other"; plan takes options alone', ranks=(1,), code=2)
    bad("short_option", [*block, "-x"], 'unknown option "-x"; options of block: ', code=2)
    bad("timeout", [*block, "--timeout-ms", -5], "--timeout-ms", "-5", code=2)


def disagreement(folder):
    """mpirun starts the last of three ranks with other arguments."""
    def block(*options):
        return ["block", BLOCK, "--output", folder / "out.safetensors", *options]

    def layer(number=0, checkpoint=QWEN, tensor="layers.0.moe_in"):
        return ["layer", "--checkpoint", checkpoint, "--layer", number, "--input", QWEN / "moe_io.safetensors", "--tensor", tensor,
                "--output", folder / "out.safetensors"]

    def differ(name, first, last, what, values=(": rank 0 has ", ", rank 2 has ")):
        bad(f"ranks_differ_in_{name}", [*first, ":", "-n", 1, TOOL, *last], "E_MISMATCH", f"ranks disagree about {what}", *values,
            ranks=(2,))

    other = folder / "other"
    shutil.copytree(QWEN, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "norm_topk_prob": not config["norm_topk_prob"]}))
    revised = folder / "revised"
    shutil.copytree(QWEN, revised)
    for path in revised.glob("*.safetensors"):
        tensors, metadata = read(path)
        for name in [name for name in tensors if name.endswith("mlp.gate.weight")]:
            kind, shape, data = tensors[name]
            tensors[name] = (kind, shape, data[len(data) // 2:] + data[:len(data) // 2])  # the second half of the rows first
        write(path, tensors, metadata)
    bad("ranks_read_other_weights", [*layer(), ":", "-n", 1, TOOL, *layer(checkpoint=revised)], "E_MISMATCH",
        "ranks disagree about the router's weights (hash): rank 0 has ", ranks=(2,))
    differ("layer", layer(), layer(1), "--layer", [": rank 0 has 0, rank 2 has 1"])
    differ("config", layer(), layer(checkpoint=other), "the description of the layer")
    differ("tensor", layer(), layer(tensor="layers.1.moe_in"), "--tensor", [": rank 0 has layers.0.moe_in, rank 2 has layers.1.moe_in"])
    differ("repeat", block("--repeat", 2), block("--repeat", 3), "--repeat", [": rank 0 has 2, rank 2 has 3"])
    differ("seed", block("--deal", "random"), block("--deal", "random", "--seed", 7), "--seed", [": rank 0 has 0, rank 2 has 7"])
    differ("backend", block(), block("--backend", "naive"), "--backend", [": rank 0 has all_to_all_v, rank 2 has naive"])


def outputs(folder):
    """Outputs that must not be replaced. A router of NaN would be named once weights are read: the output is checked before."""
    copy, checkpoint, pipe, link = folder / "copy.safetensors", folder / "checkpoint", folder / "pipe", folder / "link"
    tensors, metadata = read(BLOCK)
    router = next(name for name in tensors if name.endswith("gate.weight"))
    tensors[router] = (*tensors[router][:2], raw("f", [math.nan] * len(values(tensors[router]))))
    write(copy, tensors, metadata)
    shutil.copytree(QWEN, checkpoint)
    os.mkfifo(pipe)
    link.symlink_to(copy)
    rows = ["--input", QWEN / "moe_io.safetensors", "--tensor", "layers.0.moe_in"]
    layer = ["layer", "--checkpoint", checkpoint, "--layer", 0, *rows]
    for path in (checkpoint / "config.json", checkpoint / "model.safetensors.index.json", checkpoint / "model-00003-of-00003.safetensors"):
        bad("output_in_checkpoint", [*layer, "--output", path], f"--output '{path}' is the input file")
    bad("output_is_the_block", ["block", copy, "--output", copy], f"--output '{copy}' is the input file")
    bad("output_is_the_linked_block", ["block", link, "--output", copy], f"--output '{copy}' is the input file")
    bad("output_is_the_input", ["block", BLOCK, "--input", copy, "--output", copy], f"--output '{copy}' is the input file")
    bad("output_is_expected", ["block", BLOCK, "--expected", f"{copy}:hidden", "--output", copy], f"--output '{copy}' is the input file")
    maps = folder / "maps.json"
    experts = [i % 8 for i in range(9)]
    model = {"num_logical": 8, "physical_to_logical": [experts]}
    maps.write_text(json.dumps({"format": "moe-eplb-maps", "version": 1, "models": {"main": model}}))
    bad("output_is_the_placement", ["block", BLOCK, "--placement", maps, "--output", maps], f"--output '{maps}' is the input file",
        ranks=(3,))
    bad("output_is_a_pipe", ["block", copy, "--output", pipe], str(pipe), "is a FIFO, expected a regular file")
    bad("output_is_a_link", ["block", BLOCK, "--output", link], str(link), "is a symbolic link")
    bad("output_nowhere", ["block", copy, "--output", folder / "nothing" / "out"], "No such file")
    bad("expected_before_weights", ["block", copy, "--expected", f"{copy}:nothing"], "tensor 'nothing' is missing")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def unchanged():
        now = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        return now == before and pipe.is_fifo() and link.is_symlink()
    return unchanged


def make(folder):
    """Writes the files into the folder: the cases, and a function that says whether inputs, pipes and links are as they were."""
    for part in (files, tensors, checkpoints, usage, disagreement, outputs):
        (folder / part.__name__).mkdir()
        unchanged = part(folder / part.__name__)
    return cases, unchanged
