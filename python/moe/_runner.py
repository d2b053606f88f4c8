# SPDX-License-Identifier: Apache-2.0
# python/moe/_runner.py: Group and Runner, the C handles of the library.
from __future__ import annotations

import contextlib
import threading
import weakref
from typing import Any, Callable, Mapping, cast

import numpy
import tvm_ffi

from . import _arrays, _ffi, _watched
from ._errors import ArgumentError, ConfigError, StateError, UnsupportedError, flag, milliseconds, named, number, whole_number
from ._ffi import library as _library
from ._types import Array, ArrayT, Communicator, RunnerInfo
from ._watched import observed, transformed

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]

_forward_routed = _ffi.forward_routed
_numpy_empty = numpy.empty
#: dtypes of ids that the library takes, and those that it gets as int32; it refuses all others.
IDS = (torch.int64, torch.int32) if torch is not None else ()
_NARROW_IDS = tuple(getattr(torch, name) for name in _arrays.NARROW_IDS if hasattr(torch, name)) if torch is not None else ()
FLOAT32 = torch.float32 if torch is not None else None
_current_device = torch.cuda.current_device if torch is not None else None
_Tensor = torch.Tensor if torch is not None else ()
#: Runners by key, for the custom operators of torch, whose arguments are tensors and numbers.
by_key: weakref.WeakValueDictionary[int, Runner] = weakref.WeakValueDictionary()
_next_key = 0
_lock = threading.Lock()
CALL = ("hidden", "topk_weights")  # inputs of a call; weights may be parameters, which get no gradient

#: Fields of a router by the kind of their values: those of `moe_router_config`, which the extension reads.
ROUTER_NAMES = ("scoring", "order", "selection", "renorm", "group_score", "zero_expert", "degenerate")
ROUTER_COUNTS = ("num_experts", "topk", "num_expert_group", "topk_group", "num_zero_experts")
ROUTER_NUMBERS = (*ROUTER_COUNTS, "renorm_eps", "renorm_p", "routed_scaling_factor", "logit_softcap", "sparsemixer_eps")
ROUTER_ARRAYS = ("correction_bias", "per_expert_scale", "hash_table")
UNGATED = ("silu_no_mul", "gelu_no_mul", "gelu_tanh_no_mul", "relu2_no_mul", "relu_no_mul")


class Group:
    """The ranks that share a layer's experts. `Group()` is a group of one rank.

    Close it after its runners, or let Python do so. A group of several ranks runs one call at a time.
    """

    def __init__(self) -> None:
        self._handle = _library.group_self()

    @classmethod
    def _adopt(cls, handle: int) -> Group:
        group = cls.__new__(cls)
        group._handle = handle
        return group

    def __reduce__(self) -> Any:
        raise UnsupportedError("E_UNSUPPORTED: a moe.Group cannot be copied or pickled: every process makes its own")

    @staticmethod
    def nccl_id() -> bytes:
        """A new id of a group over NCCL, 128 bytes. One rank makes it and sends it to the others, e.g. by
        `torch.distributed.broadcast_object_list`. It serves for one group."""
        return bytes(_library.nccl_id())

    @classmethod
    def nccl(cls, id: bytes, rank: int, size: int, timeout: float = 0.0) -> Group:
        """Collective over `size` ranks that hold the same id, each with its own current GPU. timeout: seconds of every wait for other
        ranks, 0: 100 s."""
        if not isinstance(id, (bytes, bytearray, memoryview)):
            raise ArgumentError(f"E_ARG: id: is of type {type(id).__name__}, expected the 128 bytes of moe.Group.nccl_id()")
        rank, size = whole_number("rank", rank), whole_number("size", size)
        return cls._adopt(_library.group_nccl(bytes(id), rank, size, milliseconds(timeout)))

    @classmethod
    def mpi(cls, communicator: Communicator | None = None, timeout: float = 0.0) -> Group:
        """Collective over a communicator of mpi4py, or any object with its py2f(), for arrays on the host. None: MPI_COMM_WORLD; mpi4py
        then initialises MPI; without mpi4py the program must have done so. timeout: as for `nccl`."""
        deadline = milliseconds(timeout)
        if communicator is None:
            with contextlib.suppress(ImportError):
                from mpi4py import MPI

                communicator = MPI.COMM_WORLD
        if communicator is None:
            return cls._adopt(_library.group_mpi_world(deadline))
        if not hasattr(communicator, "py2f"):
            raise ArgumentError(f"E_ARG: communicator: is of type {type(communicator).__name__}, expected one of mpi4py, with py2f()")
        return cls._adopt(_library.group_mpi(communicator.py2f(), deadline))

    @property
    def rank(self) -> int:
        """Of this process in the group."""
        return _library.group_rank(self._handle)

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return _library.group_size(self._handle)

    def close(self) -> None:
        """Frees the group. Its runners keep it alive until they are closed."""
        handle, self._handle = getattr(self, "_handle", 0), 0
        if handle:
            _library.group_destroy(handle)

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def __repr__(self) -> str:
        return f"moe.Group(rank={self.rank}, size={self.size})" if self._handle else "moe.Group(closed)"


class Runner:
    """One MoE layer on one rank: all memory is taken here, and `forward` takes none.

    Args:
        w13: [E_local, 2I, H], gate rows first, then up rows; [E_local, I, H] for an ungated activation. Last extent H/2 for packed
            4-bit codes.
        w2: [E_local, H, I]; last extent I/2 for packed 4-bit codes.
        topk: experts per token, k.
        max_tokens: most rows of one call. In a group of one rank, forward_routed runs longer inputs in pieces.
        activation: "silu", "gelu", "gelu_tanh", "swigluoai_halves" (gpt-oss: limit 7), "silu_clamped", "swiglu_step", "situ", and
            ungated "silu_no_mul", "gelu_no_mul", "gelu_tanh_no_mul", "relu2_no_mul", "relu_no_mul".
        alpha, beta, limit: constants of the activations that have them; limit None: none.
        situ_gate, situ_up: bounds of "situ": situ_gate tanh(gate / situ_gate) and situ_up tanh(up / situ_up).
        w13_bias, w2_bias: float32 [E_local, 2I] and [E_local, H]; both or none.
        w13_scale, w2_scale: scales of quantised weights, as `quantize` and `nvfp4_scales` make them.
        quantization: "none", "fp8_block128", "fp8_per_token", "fp8_per_channel", "mxfp8", "mxfp8_w8a16", "int8_per_channel",
            "int8_per_token", "int4_group32", "int4_group64", "int4_group128", "int4_group128_zero", each of these four also with "_fp8",
            "mxfp4_w4a16", "mxfp4_fp8", "nvfp4_w4a16"; docs/c.md has a table.
        dtype: of hidden and output: "float32", "bfloat16", "float16"; None: w13's, or "bfloat16" with quantised weights.
        num_experts: E of all ranks; None: E_local times the size of the group.
        router: None: the caller routes and calls `forward_routed`. A dict of the fields of `moe_router_config` (`moe.route` has them):
            `forward` takes router logits.
        backend: "no_expert_parallel", "all_to_all_v", "low_latency", "high_throughput"; None: the default of the group.
        experts: None: the first that take these arrays, Hopper's before cuda_reference; else a name of docs/support.md.
        group: None: a group of one rank.
        weight_on_input: True: the router weight multiplies an expert's input instead of its output.
        num_threads: host: threads of the experts; 0: OMP_NUM_THREADS, or all cores.
        log: prints one line about the runner to stderr.
        workspace_of: GPU: a runner of the same device, with whose calls those of this runner take turns in one workspace. Calls on several
            streams wait for each other; replays of CUDA graphs must follow other calls by the program's own order. Hopper's experts
            share; others have memory of their own.
        keep_weights: False: the runner keeps no reference to the arrays, and the caller keeps them alive.

    The arrays are used where they lie: the runner keeps a reference to them. Where `weights_packed` is true it has a copy in its own
    layout instead, and keeps none: hold on to the biases, which are read where they lie.

    With torch an input of a call that needs a gradient is refused. Weights may be parameters: they get no gradient.

    It runs one call at a time: StateError for a second thread in a call.
    """

    def __init__(
        self,
        w13: Array,
        w2: Array,
        *,
        topk: int,
        max_tokens: int,
        activation: str = "silu",
        alpha: float = 1.702,
        beta: float = 1.0,
        limit: float | None = None,
        situ_gate: float = 4.0,
        situ_up: float = 25.0,
        w13_bias: Array | None = None,
        w2_bias: Array | None = None,
        w13_scale: Array | None = None,
        w2_scale: Array | None = None,
        quantization: str | None = None,
        dtype: str | None = None,
        num_experts: int | None = None,
        router: Mapping[str, str | float | Array] | None = None,
        backend: str | None = None,
        experts: str | None = None,
        group: Group | None = None,
        weight_on_input: bool = False,
        num_threads: int = 0,
        log: bool = False,
        workspace_of: Runner | None = None,
        keep_weights: bool = True,
    ) -> None:
        self._handle = 0
        for name, array in (("w13", w13), ("w2", w2)):
            _arrays.check(name, array, 3)
        for name, array, first in (("w13", w13, num_experts is None), ("w2", w2, False)):
            if not all(array.shape[0 if first else 1 :]):  # hidden, intermediate and num_experts are read from them
                raise ArgumentError(f"E_ARG: {name}: shape is {tuple(array.shape)}, expected extents of at least 1")
        named("activation", activation)
        if group is not None and not isinstance(group, Group):
            raise ArgumentError(f"E_ARG: group: is of type {type(group).__name__}, expected a moe.Group")
        if router is not None and not isinstance(router, Mapping):
            raise ArgumentError(f"E_ARG: router: is of type {type(router).__name__}, expected a dict of the fields of moe.route")
        if quantization is None:
            if w13_scale is not None or w2_scale is not None:
                raise ConfigError("E_CONFIG: quantization: None with scales given, expected the name of the scheme")
            quantization = "none"
        arrays = {"w13": w13, "w2": w2, "w13_scale": w13_scale, "w2_scale": w2_scale, "w13_bias": w13_bias, "w2_bias": w2_bias}
        arrays = {name: array for name, array in arrays.items() if array is not None}
        self._group = group if group is not None else Group()
        settings = {
            "hidden": int(w2.shape[1]),
            "intermediate": int(w13.shape[1]) // (1 if activation in UNGATED else 2),
            "num_experts": int(w13.shape[0] * self._group.size) if num_experts is None else whole_number("num_experts", num_experts),
            "topk": whole_number("topk", topk),
            "max_tokens_per_rank": whole_number("max_tokens", max_tokens),
            "activation": activation,
            "activation_alpha": number("alpha", alpha),
            "activation_beta": number("beta", beta),
            "activation_limit": 0.0 if limit is None else number("limit", limit),
            "activation_situ_gate": number("situ_gate", situ_gate),
            "activation_situ_up": number("situ_up", situ_up),
            "weight_on_input": flag("weight_on_input", weight_on_input),
            "quantization": named("quantization", quantization),
            "num_threads": whole_number("num_threads", num_threads),
            "log": flag("log", log),
        }
        names = {"dtype": dtype, "backend": backend, "experts": experts}
        settings.update({key: named(key, value) for key, value in names.items() if value is not None})
        if workspace_of is not None:
            if not isinstance(workspace_of, Runner):
                raise ArgumentError(f"E_ARG: workspace_of: is of type {type(workspace_of).__name__}, expected a moe.Runner")
            if not workspace_of._handle:
                raise StateError("E_STATE: workspace_of: it was closed")
            settings["workspace_of"] = workspace_of._handle
        router_arrays = {}
        if router is not None:
            router = checked_router(router, "router.")
            router_arrays = {key: value for key, value in router.items() if hasattr(value, "__dlpack__")}
            router = {key: _arrays.export(value, f"router.{key}") if key in router_arrays else value for key, value in router.items()}
        with _device_of(w13):
            self._handle = _library.runner_create(
                settings, {name: _arrays.export(array, name) for name, array in arrays.items()}, router, self._group._handle
            )
        info = _library.runner_info(self._handle)
        self._info = {str(key): str(value) if isinstance(value, str) else value for key, value in info.items()}
        self._max_tokens = int(max_tokens)
        self._cuda = self._info["device_type"] == 2
        self._guard = torch is not None and self._cuda and torch.cuda.device_count() > 1  # another GPU may be the current one
        self._device = self._info["device_id"]
        self._alone = self._group.size == 1
        self._framework = _arrays.framework(w13)
        #: Held around each call of a runner that its caller does not see: the library refuses a second thread in a call.
        self._turn = threading.Lock()
        self._last_stream = 0  # of the last call, and what keeps it alive
        self._stream_owner: Any = None
        if self._info["weights_packed"]:  # biases are read where they lie
            arrays = {name: array for name, array in arrays.items() if name.endswith("_bias")}
        self._kept: tuple[Any, Any] | None = (arrays if keep_weights else None, router_arrays)
        global _next_key
        with _lock:
            _next_key += 1
            self.key = _next_key
        by_key[self.key] = self

    # -- facts

    @property
    def max_tokens(self) -> int:
        """Most rows of one call of the library."""
        return self._max_tokens

    @property
    def weights_packed(self) -> bool:
        """True: the runner has its own copy of the weights and scales, which may be freed; biases may not. False: it reads them."""
        return bool(self._info["weights_packed"])

    @property
    def info(self) -> RunnerInfo:
        """device_type, device_id, rank, size, num_local_experts, weights_packed, bytes, window_bytes, dtype, quantization, backend,
        experts."""
        return cast(RunnerInfo, dict(self._info))

    # -- calls

    def forward_routed(self, hidden: ArrayT, topk_ids: Array, topk_weights: Array, output: ArrayT | None = None) -> ArrayT:
        """The layer with routing that the caller did.

        Args:
            hidden: [M, H].
            topk_ids: [M, k], experts of [0, E), each at most once in a row; -1: none. int32 and int64 are taken as they are, int8,
                int16, uint8 and uint16 become int32.
            topk_weights: [M, k]. float32 is taken as it is.
            output: [M, H] to write to, in memory that the call does not read; None: a new array.

        Returns:
            output, [M, H], of hidden's framework, dtype and device. On a GPU it is ready when the current stream has run.
        """
        if isinstance(hidden, _Tensor) and isinstance(topk_ids, _Tensor) and isinstance(topk_weights, _Tensor):
            if observed():
                return self._as_operator(hidden, topk_ids, topk_weights, output)
            if (hidden.requires_grad or topk_weights.requires_grad) and torch.is_grad_enabled():
                raise no_gradient("hidden" if hidden.requires_grad else "topk_weights")
            given = hidden, topk_ids, topk_weights, output
            if topk_ids.dtype in _NARROW_IDS:
                topk_ids = topk_ids.to(torch.int32)
            if topk_weights.dtype is not FLOAT32:
                topk_weights = _arrays.real("topk_weights", topk_weights).to(FLOAT32)
            if hidden.is_neg() or topk_weights.is_neg():  # DLPack does not say that the memory has the opposite sign
                hidden, topk_weights = hidden.resolve_neg(), topk_weights.resolve_neg()
            try:
                if output is None:
                    output = torch.empty_like(hidden)
                else:
                    will_be_written(output)
                if hidden.shape[0] <= self._max_tokens and (not self._guard or _current_device() == self._device):
                    self._last_stream = _forward_routed(self._handle, hidden, topk_ids, topk_weights, output, -1)
                    return output
                with _device_of(hidden):
                    self._in_pieces(hidden, topk_ids, topk_weights, output, -1)
            except (RuntimeError, ValueError) as error:
                if transformed():
                    return self._as_operator(*given)
                raise _arrays.explained(error, hidden=hidden, topk_ids=topk_ids, topk_weights=topk_weights, output=output) from None
            return output
        if _arrays.go_as_they_are(hidden, topk_ids, topk_weights, output) and len(hidden) <= self._max_tokens:
            if output is None:
                output = _numpy_empty(hidden.shape, hidden.dtype)
            self._stream_owner = None
            self._last_stream = _forward_routed(self._handle, hidden, topk_ids, topk_weights, output, 0)
            return output
        for name, array in (("hidden", hidden), ("topk_ids", topk_ids), ("topk_weights", topk_weights)):
            _arrays.check(name, array, 2)
        written = _arrays.empty(hidden, hidden.shape) if output is None else output
        into = _arrays.export(written) if output is None else _arrays.export_output(output)
        if _arrays.dtype_name(topk_ids) in _arrays.NARROW_IDS:
            topk_ids = _arrays.cast(topk_ids, "int32")
        ids = _arrays.export(topk_ids, "topk_ids")
        weights = _arrays.export(_arrays.cast(topk_weights, "float32"), "topk_weights")
        stream, self._stream_owner = _arrays.stream(_arrays.framework(hidden))
        self._in_pieces(_arrays.export(hidden, "hidden"), ids, weights, into, stream)
        return self._finish(written, hidden) if output is None else output

    def forward(self, hidden: ArrayT, router_logits: Array, output: ArrayT | None = None, token_ids: Array | None = None) -> ArrayT:
        """The layer with the runner's own router.

        Args:
            hidden: [M, H], at most `max_tokens` rows.
            router_logits: [M, E], or [M, E + Z] with Z zero experts: float32, bfloat16 or float16.
            output: [M, H] to write to; None: a new array.
            token_ids: int64 [M], for a router with a hash table.

        Returns:
            output, [M, H], of hidden's framework.
        """
        if torch is not None and torch.is_grad_enabled():
            for name, array in (("hidden", hidden), ("router_logits", router_logits)):
                if isinstance(array, _Tensor) and array.requires_grad:
                    raise no_gradient(name)
        for name, array in (("hidden", hidden), ("router_logits", router_logits)):
            _arrays.check(name, array, 2)
        written = _arrays.empty(hidden, hidden.shape) if output is None else output
        into = _arrays.export(written) if output is None else _arrays.export_output(output)
        tokens = None if token_ids is None else _arrays.export(token_ids, "token_ids")
        stream, self._stream_owner = _arrays.stream(_arrays.framework(hidden))
        logits = _arrays.export(router_logits, "router_logits")
        with _device_of(hidden):
            self._last_stream = _ffi.forward(self._handle, _arrays.export(hidden, "hidden"), logits, into, tokens, stream)
        return self._finish(written, hidden) if output is None else output

    __call__ = forward_routed

    def _as_operator(self, hidden: Any, topk_ids: Any, topk_weights: Any, output: Any) -> Any:
        return as_operator(lambda: torch.ops.moe.forward_routed(hidden, topk_ids, topk_weights, self.key), output,
                           hidden=hidden, topk_weights=topk_weights)  # fmt: skip

    def _in_pieces(self, hidden: Any, ids: Any, weights: Any, output: Any, stream: int) -> None:
        """Rows do not depend on each other: in a group of one rank a long input runs in pieces."""
        rows = hidden.shape[0]
        if rows <= self._max_tokens or not self._alone:
            self._last_stream = _forward_routed(self._handle, hidden, ids, weights, output, stream)
            return
        for name, array in (("topk_ids", ids), ("topk_weights", weights), ("output", output)):
            if tuple(array.shape[:1]) != (rows,):
                raise ArgumentError(f"E_ARG: {name}: shape is {tuple(array.shape)}, expected {rows} rows")
        _library.refuse_overlap(output, hidden, ids, weights)
        for first in range(0, rows, self._max_tokens):
            count = min(self._max_tokens, rows - first)
            pieces = [_rows(array, first, count) for array in (hidden, ids, weights, output)]
            self._last_stream = _forward_routed(self._handle, *pieces, stream)

    def _finish(self, output: Any, like: Any) -> Any:
        if self._cuda and _arrays.framework(like) == "jax":
            self.wait(0)
        return _arrays.finish(output, like)

    def weights_changed(self) -> None:
        """The weights were overwritten in place: a runner that has packed them packs them again, on the stream that is current in their
        framework. Not after they were freed or moved: it reads them at the addresses that the constructor was given."""
        stream, owner = _arrays.stream(self._framework) if self._cuda else (0, None)
        if stream == _arrays.CURRENT_STREAM:
            stream = torch.cuda.current_stream(self._device).cuda_stream
        _library.runner_weights_changed(self._handle, stream)
        self._last_stream, self._stream_owner = stream, owner

    def check(self) -> None:
        """Raises errors of calls that the device has finished. Does not wait."""
        _library.runner_check(self._handle)

    def wait(self, stream: int | None = None) -> None:
        """Waits for a CUDA stream, within the deadline, and raises its errors. None: for the one of the last call, of whatever framework,
        which must still exist, and for torch's current one, on which CUDA graphs of calls are replayed."""
        if stream is not None:
            _library.runner_wait(self._handle, stream)
            return
        _library.runner_wait(self._handle, self._last_stream)
        if self._cuda and torch is not None and torch.cuda.is_initialized():
            current = torch.cuda.current_stream(self._device).cuda_stream
            if current != self._last_stream:
                _library.runner_wait(self._handle, current)

    def close(self) -> None:
        """Waits for the device's work with the runner and frees it. Python does so when nothing refers to it any more."""
        handle = getattr(self, "_handle", 0)
        if not handle:
            return
        if getattr(self, "_cuda", False):  # its memory must not be in use
            if torch is not None and torch.cuda.is_initialized():
                torch.cuda.synchronize(self._device)  # all streams: graphs replay on any
            else:
                _library.stream_wait(self._device, self._last_stream, 0)
        self._handle = 0
        _library.runner_destroy(handle)
        self._kept = self._stream_owner = None

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def __reduce__(self) -> Any:
        raise UnsupportedError("E_UNSUPPORTED: a moe.Runner cannot be copied or pickled: make another from its arrays")

    def __repr__(self) -> str:
        if not self._handle:
            return "moe.Runner(closed)"
        return "moe.Runner({backend}, {experts}, {quantization}, {dtype}, num_local_experts={num_local_experts})".format(**self._info)


def checked_router(router: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The fields, names, counts and numbers as such. ArgumentError for one of another type, by its name behind `prefix`. The extension
    refuses unknown fields."""
    checked = dict(router)
    for key, value in router.items():
        if not isinstance(key, str):
            raise ArgumentError(f"E_ARG: router: the key {key!r} is of type {type(key).__name__}, expected the name of a field")
        name = prefix + key
        if key in ROUTER_NAMES:
            checked[key] = named(name, value)
        elif key in ROUTER_COUNTS:
            checked[key] = whole_number(name, value)
        elif key in ROUTER_NUMBERS:
            checked[key] = number(name, value)
        elif key in ROUTER_ARRAYS and not hasattr(value, "__dlpack__"):
            raise ArgumentError(f"E_ARG: {name}: is of type {type(value).__name__}, expected an array")
    return checked


def as_operator(call: Callable[[], Any], output: Any, **tensors: Any) -> Any:
    """The result of one of torch's operators, in `output` where the caller gave one. Outside of torch.compile, whose graph refuses them
    when it runs: UnsupportedError for inputs that need a gradient or have a tangent."""
    if _watched.is_compiling():
        return into_output(call(), output)
    for name, tensor in tensors.items():
        if not isinstance(tensor, _Tensor):
            continue
        if _watched.has_tangent(tensor):
            raise UnsupportedError(f"E_UNSUPPORTED: {name} has a tangent of forward-mode AD, and the library has no gradients")
        if tensor.requires_grad and torch.is_grad_enabled() and (name in CALL or torch._C._functorch.is_functorch_wrapped_tensor(tensor)):
            raise no_gradient(name)
    with torch.no_grad():
        return into_output(call(), output)


def into_output(result: Any, output: Any) -> Any:
    return result if output is None else output.copy_(result)


def will_be_written(output: Any) -> None:
    """Before a call of the library that writes to the caller's tensor: ArgumentError for one that it must not write to. torch learns of
    the write, so that a backward pass that needs the values before is refused."""
    if not isinstance(output, _Tensor):
        return
    if output.requires_grad and torch.is_grad_enabled():
        raise no_gradient("output")
    if output.is_neg():
        raise ArgumentError("E_ARG: output: is a view with the opposite sign of its memory, expected a plain tensor")
    torch.autograd.graph.increment_version(output)


def no_gradient(name: str) -> UnsupportedError:
    return UnsupportedError(f"E_UNSUPPORTED: {name} requires a gradient, and the library has none: call under torch.no_grad()")


def _rows(array: Any, first: int, count: int) -> Any:
    return _library.rows(array, first, count) if isinstance(array, tvm_ffi.Tensor) else array[first : first + count]


def _device_of(array: Any) -> Any:
    """The array's device as the current one while the context lasts."""
    if torch is not None and isinstance(array, torch.Tensor):
        return torch.cuda.device(array.device) if array.is_cuda else contextlib.nullcontext()
    if _arrays.framework(array) == "cupy":
        return array.device
    return contextlib.nullcontext()


#: Runners that share a workspace, by device and scope.
_sharers: dict[tuple[int, Any], weakref.WeakSet[Runner]] = {}


def sharing_runner(w13: Any, scope: Any, **settings: Any) -> Runner:
    """A runner that shares its workspace with the others that this function made in the scope, on the device of its weights."""
    kind, device = w13.__dlpack_device__()
    if kind != 2:
        return Runner(w13=w13, **settings)
    sharers = _sharers.setdefault((int(device), scope), weakref.WeakSet())
    open_ones = [runner for runner in sharers if runner._handle]
    runner = Runner(w13=w13, workspace_of=open_ones[0] if open_ones else None, **settings)
    sharers.add(runner)
    return runner


def runner_of(key: int) -> Runner:
    """The runner of a custom operator's argument."""
    runner = by_key.get(key)
    if runner is None:
        raise StateError(f"E_STATE: runner {key}: it was closed")
    return runner
