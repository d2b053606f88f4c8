# SPDX-License-Identifier: Apache-2.0
# python/moe/_watched.py: whether something of torch watches, traces or transforms what runs.
from __future__ import annotations

import contextlib
import threading
from typing import Any, Iterator

try:
    import torch
    from torch.autograd import forward_ad as _forward_ad

    is_compiling = torch.compiler.is_compiling
    _dispatch_modes, _tracing_state = torch._C._len_torch_dispatch_stack, torch._C._get_tracing_state
    _transforms = torch._C._are_functorch_transforms_active
except ImportError:
    torch = None  # type: ignore[assignment]

_inside = threading.local()  # .operator: whether this thread is in one of torch's operators


def observed() -> bool:
    """Whether something of torch watches the operators that run: torch.compile, torch.jit.trace, make_fx, fake tensors, any other dispatch
    mode, forward-mode AD. A call must be one of torch's operators then. Never within such an operator. Inputs that torch.func has wrapped
    show when the library is to read them: `transformed`."""
    return is_compiling() or (
        (_dispatch_modes() != 0 or _tracing_state() is not None or _forward_ad._current_level >= 0)
        and not getattr(_inside, "operator", False)
    )


def transformed() -> bool:
    """Whether a transform of torch.func is active, whose tensors have no memory."""
    return _transforms() and not getattr(_inside, "operator", False)


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """Around the code of an operator, which works on the values themselves."""
    before, state = getattr(_inside, "operator", False), _tracing_state()
    _inside.operator = True
    if state is not None:
        torch._C._set_tracing_state(None)
    try:
        yield
    finally:
        _inside.operator = before
        if state is not None:
            torch._C._set_tracing_state(state)


def has_tangent(tensor: Any) -> bool:
    """Whether it is a dual tensor of forward-mode AD."""
    return _forward_ad._current_level >= 0 and _forward_ad.unpack_dual(tensor).tangent is not None


def is_traced(tensor: Any) -> bool:
    """Whether a call that is none of torch's operators would lose what torch does with this tensor: record it in a graph, transform it,
    compute its tangent."""
    if is_compiling() or getattr(_inside, "operator", False):
        return False
    if _tracing_state() is not None or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return True
    proxies = _dispatch_modes() != 0 and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
    return proxies or has_tangent(tensor)
