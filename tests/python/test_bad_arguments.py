# SPDX-License-Identifier: Apache-2.0
# tests/python/test_bad_arguments.py: every bad argument is an exception of the package that names the argument; what must not be written
# is not written.
import copy
import ctypes
import inspect
import pickle

import moe
import numpy as np
import pytest
from moe import _runner

HIDDEN = np.ones((4, 64), np.float32)
IDS = np.tile(np.array([0, 1], np.int32), (4, 1))
WEIGHTS = np.ones((4, 2), np.float32)
W13 = np.full((8, 256, 64), 0.01, np.float32)
W2 = np.full((8, 64, 128), 0.01, np.float32)


def experts(**changed):
    arguments = {"hidden": HIDDEN, "topk_ids": IDS, "topk_weights": WEIGHTS, "w13": W13, "w2": W2, **changed}
    return moe.experts(**arguments)


def runner(**changed):
    arguments = {"w13": W13, "w2": W2, "topk": 2, "max_tokens": 4, **changed}
    return moe.Runner(**arguments)


def frozen():
    array = np.zeros((4, 64), np.float32)
    array.flags.writeable = False
    return array


class ReadOnly:
    """An array of no known framework that says by DLPack 1.0 that it must not be written."""

    def __init__(self, array):
        array.flags.writeable = False
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@pytest.mark.parametrize("name", ["hidden", "topk_ids", "topk_weights", "w13", "w2"])
@pytest.mark.parametrize("value", [None, [[1.0]], "x", 3])
def test_no_array(name, value):
    with pytest.raises(moe.ArgumentError, match=f"^E_ARG: {name}: is of type {type(value).__name__}, expected an array"):
        experts(**{name: value})


@pytest.mark.parametrize("name", ["w13_bias", "w2_bias", "w13_scale", "w2_scale"])
def test_no_optional_array(name):
    with pytest.raises(moe.ArgumentError, match=f"^E_ARG: {name}: is of type list"):
        experts(**{name: [1]})


@pytest.mark.parametrize("dtype", [complex, object, "U3", "datetime64[s]"])
@pytest.mark.parametrize("name", ["hidden", "topk_ids", "topk_weights"])
def test_no_numbers(name, dtype):
    with pytest.raises(moe.ArgumentError, match=f"^E_ARG: {name}: dtype is .*, expected real numbers"):
        experts(**{name: np.zeros((4, 2)).astype(dtype)})


@pytest.mark.parametrize("dtype", [np.dtype(np.float32).newbyteorder(), np.longdouble, np.dtype([("a", np.float32)])])
def test_numbers_that_dlpack_does_not_have(dtype):
    text = "dtype is .*, expected real numbers of at most 64 bits in this machine's byte order"
    calls = {"topk_ids": lambda x: experts(topk_ids=x(IDS)), "w13": lambda x: experts(w13=x(W13)), "w2": lambda x: runner(w2=x(W2)),
             "output": lambda x: experts(output=x(HIDDEN)), "logits": lambda x: moe.route(x(np.zeros((4, 8))), 2),
             "matrix": lambda x: moe.quantize(x(W2), "fp8_per_token"), "load": lambda x: moe.plan(x(np.ones((1, 8))), 8)}  # fmt: skip
    for name, call in calls.items():
        with pytest.raises(moe.ArgumentError, match=f"^E_ARG: {name}: {text}"):
            call(lambda array: np.zeros(array.shape, dtype))


def test_strides():
    layer, turned, apart = runner(), np.asfortranarray(HIDDEN), np.zeros((4, 128), np.float32)[:, ::2]
    row = "expected adjacent elements in a row, stride 1"
    cases = [
        (lambda: layer.forward_routed(turned, IDS, WEIGHTS), rf"hidden: strides are \[1, 4\], {row}"),
        (lambda: layer.forward_routed(HIDDEN[::-1], IDS, WEIGHTS), r"hidden: strides are \[-64, 1\], expected a row stride of at least 64"),
        (lambda: layer.forward_routed(HIDDEN, np.asfortranarray(IDS), WEIGHTS), rf"topk_ids: strides are \[1, 4\], {row}"),
        (lambda: layer.forward_routed(HIDDEN, IDS, WEIGHTS, output=apart), rf"output: strides are \[128, 2\], {row}"),
        (lambda: runner(w13=np.asfortranarray(W13)), r"w13: strides are \[1, 8, 2048\], expected contiguous rows of \[8, 256, 64\]"),
        (lambda: runner(w2=W2[::-1]), r"w2: strides are \[-8192, 128, 1\], expected contiguous rows of \[8, 64, 128\]"),
    ]
    for call, text in cases:
        with pytest.raises(moe.ArgumentError, match=f"^E_ARG: {text}"):
            call()
    assert np.array_equal(layer.forward_routed(HIDDEN, IDS, WEIGHTS), experts())


class Elsewhere:
    """An array of no known framework on a device that is not there: host memory whose capsule names cuda:3."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def __dlpack__(self, **options):
        capsule = self.array.__dlpack__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        device = (ctypes.c_int32 * 2).from_address(pointer(capsule, b"dltensor") + ctypes.sizeof(ctypes.c_void_p))  # behind DLTensor.data
        device[:] = self.__dlpack_device__()
        return capsule

    def __dlpack_device__(self):
        return 2, 3  # kDLCUDA


def test_devices():
    layer, output = runner(), np.zeros((4, 64), np.float32)
    calls = {"hidden": lambda: layer.forward_routed(Elsewhere(HIDDEN), IDS, WEIGHTS, output=output),
             "topk_ids": lambda: layer.forward_routed(HIDDEN, Elsewhere(IDS), WEIGHTS),
             "topk_weights": lambda: layer.forward_routed(HIDDEN, IDS, Elsewhere(WEIGHTS)),
             "output": lambda: layer.forward_routed(HIDDEN, IDS, WEIGHTS, output=Elsewhere(output)),
             "w2": lambda: runner(w2=Elsewhere(W2)),
             "w13_bias": lambda: runner(w13_bias=Elsewhere(np.zeros((8, 256), np.float32)), w2_bias=np.zeros((8, 64), np.float32))}
    for name, call in calls.items():
        with pytest.raises(moe.ArgumentError, match=f"^E_ARG: {name}: .*cuda:3.*cpu"):
            call()
    assert np.array_equal(layer.forward_routed(HIDDEN, IDS, WEIGHTS), experts())


CASES = [
    (lambda: experts(alpha="x"), moe.ArgumentError, "alpha: is 'x' of type str, expected a number"),
    (lambda: experts(activation=3), moe.ArgumentError, "activation: is of type int, expected a name"),
    (lambda: experts(hidden=np.ones(64, np.float32)), moe.ArgumentError, r"hidden: 1 dimensions \(64,\), expected 2"),
    (lambda: runner(topk=None), moe.ArgumentError, "topk: is None of type NoneType, expected a whole number"),
    (lambda: runner(topk=2.5), moe.ArgumentError, "topk: is 2.5 of type float, expected a whole number"),
    (lambda: runner(max_tokens=2**70), moe.ArgumentError, "max_tokens: 1180591620717411303424 is out of range"),
    (lambda: runner(group="g"), moe.ArgumentError, "group: is of type str, expected a moe.Group"),
    (lambda: runner(router=[1]), moe.ArgumentError, "router: is of type list, expected a dict"),
    (lambda: runner(router={"scoring": 3}), moe.ArgumentError, "router.scoring: is of type int, expected a name"),
    (lambda: runner(router={"renorm_eps": "x"}), moe.ArgumentError, "router.renorm_eps: is 'x' of type str, expected a number"),
    (lambda: runner(router={"topk_group": 2.5}), moe.ArgumentError, "router.topk_group: is 2.5 of type float, expected a whole number"),
    (lambda: runner(quantization=3), moe.ArgumentError, "quantization: is of type int, expected a name"),
    (lambda: experts(quantization=3), moe.ArgumentError, "quantization: is of type int, expected a name"),
    (lambda: runner(dtype=np.float32), moe.ArgumentError, "dtype: is of type type, expected a name"),
    (lambda: runner(backend=4), moe.ArgumentError, "backend: is of type int, expected a name"),
    (lambda: runner(experts=4), moe.ArgumentError, "experts: is of type int, expected a name"),
    (lambda: runner(weight_on_input="yes"), moe.ArgumentError, "weight_on_input: is 'yes' of type str, expected True or False"),
    (lambda: runner(log=None), moe.ArgumentError, "log: is None of type NoneType, expected True or False"),
    (lambda: runner(workspace_of=3), moe.ArgumentError, "workspace_of: is of type int, expected a moe.Runner"),
    (lambda: experts(hidden=HIDDEN.astype(np.float64)), moe.ArgumentError, "hidden: dtype is float64, expected float32, bfloat16 or"),
    (lambda: runner(topk=0), moe.ConfigError, r"topk: 0 is out of range \[1, 8\]"),
    (lambda: runner(topk=2**31), moe.ArgumentError, r"topk: 2147483648 is out of range \[-2147483648, 2147483647\]"),
    (lambda: runner(max_tokens=0), moe.ConfigError, "max_tokens: 0 is below 1"),
    (lambda: runner(max_tokens=2**40), moe.CapacityError, "max_tokens: 1099511627776 exceeds 16777216"),
    (lambda: runner(alpha=float("nan")), moe.ConfigError, "alpha: nan is not a finite number"),
    (lambda: runner(beta=float("inf")), moe.ConfigError, "beta: inf is not a finite number"),
    (lambda: runner(limit=-1), moe.ConfigError, r"limit: -1 is out of range \[0, infinity\]"),
    (lambda: runner(situ_gate=0), moe.ConfigError, "situ_gate: 0 is not positive and finite"),
    (lambda: runner(situ_up=-1), moe.ConfigError, "situ_up: -1 is not positive and finite"),
    (lambda: runner(w13=W13[:, :0]), moe.ArgumentError, r"w13: shape is \(8, 0, 64\), expected extents of at least 1"),
    (lambda: runner(w13=W13[:0], w2=W2[:0]), moe.ArgumentError, r"w13: shape is \(0, 256, 64\), expected extents of at least 1"),
    (lambda: runner(w2=W2[:, :0]), moe.ArgumentError, r"w2: shape is \(8, 0, 128\), expected extents of at least 1"),
    (lambda: runner(w13_bias=np.zeros((8, 256), np.float32)), moe.ArgumentError, "w2_bias: is None, but the other matrix has a bias"),
    (lambda: runner(activation="max_tokens_per_rank"), moe.ConfigError, 'activation: unknown name "max_tokens_per_rank"'),
    (lambda: runner(router={3: 1}), moe.ArgumentError, "router: the key 3 is of type int, expected the name of a field"),
    (lambda: runner(router={"topk": 2**31}), moe.ArgumentError, r"router.topk: 2147483648 is out of range \[-2147483648, 2147483647\]"),
    (lambda: runner(router={"scoring": "x"}), moe.ConfigError, 'router.scoring: unknown name "x"; known: softmax, sigmoid, sqrtsoftplus'),
    (lambda: runner(router={"num_expert_group": 8, "topk_group": 1}), moe.ConfigError,
     "topk_group: 1 groups of 1 experts hold less than topk 2"),
    (lambda: runner(router={"selection": "sparsemixer", "renorm": "sum"}), moe.ArgumentError, 'router.renorm: "sum" with selection sparse'),
    (lambda: runner(router={"selection": "hash_table", "hash_table": np.zeros((0, 2), np.int64)}), moe.ArgumentError,
     r"router.hash_table: shape is \[0, 2\], expected \[vocabulary, 2\], at least one row"),
    (lambda: experts(hidden=HIDDEN[:, :8]), moe.ArgumentError, "hidden: width: 8, expected 64"),
    (lambda: experts(topk_ids=IDS[:, :0]), moe.ConfigError, r"topk_ids: shape is \(4, 0\), expected 1 to 8 columns"),
    (lambda: experts(topk_ids=np.zeros((4, 9), np.int32)), moe.ConfigError, r"topk_ids: shape is \(4, 9\), expected 1 to 8 columns"),
    (lambda: runner(max_tokens=2, router={}).forward(HIDDEN, HIDDEN[:, :8]), moe.CapacityError, "hidden: 4 rows exceed max_tokens 2"),
    (lambda: runner().forward(HIDDEN, HIDDEN[:, :8]), moe.StateError, r"forward: this runner has no router; call forward_routed\(\)"),
    (lambda: moe.route(HIDDEN[:, :0], 1), moe.ArgumentError, r"logits: shape is \(4, 0\), expected at least 1 column"),
    (lambda: moe.route(HIDDEN, 1, num_zero_experts=64), moe.ConfigError, r"num_zero_experts: 64 is out of range \[0, 63\], logits has 6"),
    (lambda: moe.route(HIDDEN, 1, num_zero_experts=-(2**31)), moe.ConfigError, "num_zero_experts: -2147483648 is out of range"),
    (lambda: moe.route(HIDDEN, 1, order="x"), moe.ConfigError, 'order: unknown name "x"; known: score_then_topk, topk_then_score'),
    (lambda: moe.route(HIDDEN, 1, correction_bias=np.zeros(3, np.float32)), moe.ArgumentError,
     r"correction_bias: shape is \[3\], expected \[64\]"),
    (lambda: moe.route(HIDDEN, 1, topk_group=2**31), moe.ArgumentError, "topk_group: 2147483648 is out of range"),
    (lambda: moe.route(HIDDEN.astype(np.float64), 1), moe.ArgumentError, "logits: dtype is float64, expected float32, bfloat16 or float16"),
    (lambda: moe.plan(HIDDEN, 65, num_ranks=2), moe.ArgumentError, "num_physical: 65 is not a multiple of num_ranks 2"),
    (lambda: moe.plan(HIDDEN, 63), moe.ArgumentError, "num_physical: 63 is below 64, the number of logical experts"),
    (lambda: moe.plan(HIDDEN, 64, num_nodes=2**31), moe.ArgumentError, "num_nodes: 2147483648 is out of range"),
    (lambda: runner(router={"scorin": "softmax"}), moe.ConfigError, "router: 'scorin' is not known, known: correction_bias, degenerate, "),
    (lambda: runner(router={"num_experts": 8, "top_k": 2}), moe.ConfigError, "router: 'top_k' is not known, known: .*, topk, "),
    (lambda: runner(router={"bias": W2[0]}), moe.ConfigError, "router: 'bias' is not known, known: "),
    (lambda: runner(router={"hash_table": 1}), moe.ArgumentError, "router.hash_table: is of type int, expected an array"),
    (lambda: runner().forward_routed(None, IDS, WEIGHTS), moe.ArgumentError, "hidden: is of type NoneType"),
    (lambda: moe.route([[1.0]], 1), moe.ArgumentError, "logits: is of type list"),
    (lambda: moe.route(np.zeros((2, 4), np.float32), "2"), moe.ArgumentError, "topk: is '2' of type str"),
    (lambda: moe.route(np.zeros((2, 4), np.float32), -1), moe.ConfigError, r"topk: -1 is out of range \[1, 4\]"),
    (lambda: moe.route(np.zeros((2, 4), np.float32), 1, renorm=True), moe.ArgumentError, "renorm: is of type bool, expected a name"),
    (lambda: moe.route(np.zeros((2, 4), np.float32), 1, renorm_eps="x"), moe.ArgumentError, "renorm_eps: is 'x' of type str, expected a n"),
    (lambda: moe.route(np.zeros((2, 4), np.float32), 1, num_zero_experts="1"), moe.ArgumentError, "num_zero_experts: is '1' of type str"),
    (lambda: moe.quantize([[1.0]], "none"), moe.ArgumentError, "matrix: is of type list"),
    (lambda: moe.quantize(W2, None), moe.ArgumentError, "quantization: is of type NoneType"),
    (lambda: moe.nvfp4_scales(np.ones((2, 4, 2), np.int8), np.ones(2, np.float32)), moe.ArgumentError, "scales: dtype is int8, expected"),
    (lambda: moe.nvfp4_scales(np.ones((2, 4, 2), np.uint8), np.ones(2)), moe.ArgumentError, "global_scale: dtype is float64, expected"),
    (lambda: moe.nvfp4_scales(np.ones((2, 4, 2), np.uint8), np.ones(3, np.float32)), moe.ArgumentError,
     r"global_scale: shape is \(3,\), expected \(2,\)"),
    (lambda: moe.plan([[1]], 2), moe.ArgumentError, "load: is of type list"),
    (lambda: moe.plan(np.ones((1, 4), np.float32), -3), moe.ArgumentError, r"num_physical: -3 is out of range \[1, 16777216\]"),
    (lambda: moe.plan(np.ones((1, 4), np.float32), 2**40), moe.ArgumentError, "num_physical: 1099511627776 is out of range"),
    (lambda: moe.plan(np.ones((1, 4), np.float32), 4, num_ranks="2"), moe.ArgumentError, "num_ranks: is '2' of type str, expected a whole"),
    (lambda: moe.plan(np.ones((1, 4), np.float32), 4, num_groups=None), moe.ArgumentError, "num_groups: is None of type NoneType"),
    (lambda: moe.has(3), moe.ArgumentError, "feature: is of type int, expected a name"),
    (lambda: moe.Group.nccl("abc", 0, 1), moe.ArgumentError, "id: is of type str, expected the 128 bytes"),
    (lambda: moe.Group.nccl(bytes(128), "0", 1), moe.ArgumentError, "rank: is '0' of type str"),
    (lambda: moe.Group.nccl(bytes(128), 0, 1, timeout=float("nan")), moe.ArgumentError, r"timeout: nan is out of range \[0, 1e6\]"),
]


@pytest.mark.parametrize("call, error, text", CASES, ids=[text for _, _, text in CASES])
def test_each_is_named(call, error, text):
    with pytest.raises(error, match=f"^{error.code}: {text}"):
        call()


def test_a_long_input_is_refused_as_a_whole():
    """It runs in pieces: rows that do not fit are counted in all of it, before the first piece is written."""
    layer, output = runner(max_tokens=3), np.zeros((4, 64), np.float32)
    cases = [
        ("topk_ids", lambda: layer.forward_routed(HIDDEN, IDS[:3], WEIGHTS, output=output), r"\(3, 2\)"),
        ("topk_weights", lambda: layer.forward_routed(HIDDEN, IDS, WEIGHTS[:3], output=output), r"\(3, 2\)"),
        ("output", lambda: layer.forward_routed(HIDDEN, IDS, WEIGHTS, output=output[:3]), r"\(3, 64\)"),
    ]
    for name, call, shape in cases:
        with pytest.raises(moe.ArgumentError, match=f"^E_ARG: {name}: shape is {shape}, expected 4 rows$"):
            call()
    assert not output.any()
    assert np.array_equal(layer.forward_routed(HIDDEN, IDS, WEIGHTS, output=output), experts())


def test_the_fields_of_a_router_are_those_of_the_extension_and_of_route():
    known = sorted([*_runner.ROUTER_NAMES, *_runner.ROUTER_NUMBERS, *_runner.ROUTER_ARRAYS])
    with pytest.raises(moe.ConfigError, match=f"^E_CONFIG: router: 'colour' is not known, known: {', '.join(known)}$"):
        _runner._library.route({"colour": 3}, np.zeros((2, 4), np.float32), None, IDS, WEIGHTS, 0)
    assert sorted({*inspect.signature(moe.route).parameters, "num_experts"} - {"logits", "token_ids"}) == known
    with pytest.raises(TypeError, match="'scorin'"):
        moe.route(np.zeros((2, 4), np.float32), 2, scorin="softmax")


def test_what_is_closed_says_so():
    closed = runner()
    closed.close()
    for call in (lambda: closed.forward_routed(HIDDEN, IDS, WEIGHTS), closed.check, closed.wait, closed.weights_changed):
        with pytest.raises(moe.StateError, match="^E_STATE: runner: it was closed"):
            call()
    group = moe.Group()
    group.close()
    for call in (lambda: group.rank, lambda: runner(group=group)):
        with pytest.raises(moe.StateError, match="^E_STATE: group: it was closed"):
            call()


def test_outputs_that_must_not_be_written(tmp_path):
    zeros = np.zeros((4, 64), np.float32)
    zeros.tofile(tmp_path / "rows")
    mapped = np.memmap(tmp_path / "rows", np.float32, "r", shape=(4, 64))
    text = bytes(zeros.nbytes)
    over_bytes = np.frombuffer(text, np.float32).reshape(4, 64)
    layer = runner(router={"num_experts": 8, "topk": 2})
    for output in (frozen(), mapped, over_bytes, np.broadcast_to(np.float32(0), (4, 64)), ReadOnly(np.zeros((4, 64), np.float32))):
        for call in (
            lambda: experts(output=output),
            lambda: layer.forward_routed(HIDDEN, IDS, WEIGHTS, output=output),
            lambda: layer.forward(HIDDEN, np.zeros((4, 8), np.float32), output=output),
        ):
            with pytest.raises(moe.ArgumentError, match="^E_ARG: output: is read-only, expected an array that can be written to"):
                call()
    assert text == bytes(zeros.nbytes) and not mapped.any()
    assert np.array_equal(experts(hidden=np.frombuffer(HIDDEN.tobytes(), np.float32).reshape(4, 64)), experts()), "inputs may be read-only"


def test_jax_arrays_are_not_written_and_not_traced():
    jax = pytest.importorskip("jax")
    hidden = jax.numpy.asarray(HIDDEN)
    with pytest.raises(moe.ArgumentError, match="^E_ARG: output: is an array of JAX, which never change"):
        experts(hidden=hidden, output=jax.numpy.zeros((4, 64)))
    with pytest.raises(moe.UnsupportedError, match="^E_UNSUPPORTED: hidden: is traced by JAX"):
        jax.jit(lambda x: experts(hidden=x))(hidden)


def test_none_is_no_quantization():
    codes, scales = moe.quantize(W2, "none")
    assert codes is W2 and scales is None


def test_the_flag_is_where_dlpack_says():
    assert moe._arrays._is_read_only(frozen()) and not moe._arrays._is_read_only(np.zeros(4))


def test_settings_of_numpy_are_taken():
    settings = {"num_expert_group": np.int64(2), "topk_group": np.int32(1), "renorm_eps": np.float32(1e-3), "renorm": np.str_("sum")}
    ids, weights = moe.route(np.arange(32, dtype=np.float32).reshape(4, 8), np.int64(2), **settings)
    layer = runner(router=settings, weight_on_input=np.bool_(True), log=np.bool_(False))
    assert np.all(ids == [7, 6]) and layer.forward(HIDDEN, np.zeros((4, 8), np.float32)).shape == HIDDEN.shape
    assert np.allclose(weights.sum(-1), 1, atol=1e-2)


@pytest.mark.parametrize("what", ["copy", "deepcopy", "pickle"])
def test_runners_and_groups_are_not_copied(what):
    """A copy would close the original's handle."""
    make = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": pickle.dumps}[what]
    for original in (moe.Group(), runner()):
        with pytest.raises(moe.UnsupportedError, match=f"^E_UNSUPPORTED: a moe.{type(original).__name__} cannot be copied or pickled"):
            make(original)
        original.close()
