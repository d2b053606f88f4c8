# SPDX-License-Identifier: Apache-2.0
# tests/python/test_types.py: the types that public functions state.
import inspect
import typing

import numpy as np
import pytest

import moe

FRAMEWORK = "of the framework of an input, which a NamedTuple cannot state"
LOOSE = {
    **{f"{answer.__name__}.{field}": FRAMEWORK for answer in (moe.Routing, moe.Quantized, moe.Plan) for field in answer._fields},
    "Array.dtype": "each framework has types of its own for it",
    "Array.__dlpack__": "a capsule, and a stream by the device's numbers",
    "Array.__dlpack_device__": "an enumeration of the framework's own",
}


def loose(annotation) -> bool:
    return annotation is typing.Any or any(loose(part) for part in typing.get_args(annotation))


def stated(name, function):
    """(name, annotation) of parameters and answer; a parameter without one counts as Any."""
    hints = typing.get_type_hints(function)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name not in ("self", "cls"):
            yield f"{name}({parameter.name})", hints.get(parameter.name, typing.Any)
    if inspect.isfunction(function):
        yield f"{name}()", hints.get("return", typing.Any)


def public():
    for name in moe.__all__:
        thing = getattr(moe, name)
        if inspect.isfunction(thing):
            yield from stated(name, thing)
        elif issubclass(thing, tuple):
            yield from ((f"{name}.{field}", hint) for field, hint in typing.get_type_hints(thing).items())
        elif issubclass(thing, dict):
            yield from ((f"{name}[{field}]", hint) for field, hint in typing.get_type_hints(thing).items())
        elif not issubclass(thing, Exception):
            for member, function in vars(thing).items():
                if isinstance(function, property):
                    yield f"{name}.{member}", typing.get_type_hints(function.fget).get("return", typing.Any)
                elif inspect.isfunction(function) or isinstance(function, (classmethod, staticmethod)):
                    made = member == "__init__" and not getattr(thing, "_is_protocol", False)
                    if not member.startswith("_") or made or member in ("__dlpack__", "__dlpack_device__"):
                        yield from ((f"{name}.{member}", hint) for _, hint in stated(member, getattr(function, "__func__", function)))


def test_no_public_signature_says_any():
    found = {name for name, hint in public() if loose(hint)}
    assert found == set(LOOSE)
    assert len(list(public())) > 60


@pytest.mark.parametrize("framework", ["numpy", "jax", "torch"])
def test_arrays_satisfy_the_protocol(framework):
    module = pytest.importorskip("jax.numpy" if framework == "jax" else framework, reason=f"{framework} is not installed")
    array = (module.from_numpy if framework == "torch" else module.asarray)(np.ones((2, 3), np.float32))
    assert isinstance(array, moe.Array)
    assert not isinstance([1.0], moe.Array)


def test_the_answer_has_the_type_of_the_input():
    for function, parameter in ((moe.experts, "hidden"), (moe.Runner.forward, "hidden"), (moe.Runner.forward_routed, "hidden")):
        hints = typing.get_type_hints(function)
        assert isinstance(hints["return"], typing.TypeVar) and hints["return"] is hints[parameter]
        assert hints["return"].__bound__ in (moe.Array, typing.ForwardRef("Array"))


def test_info_has_the_members_that_it_states():
    if not moe.has("onednn"):
        pytest.skip("libmoe was built without oneDNN, so that no experts run on the host")
    with moe.Runner(np.ones((2, 8, 8), np.float32), np.ones((2, 8, 4), np.float32), topk=1, max_tokens=1) as runner:
        info = runner.info
    hints = typing.get_type_hints(moe.RunnerInfo)
    assert {name: type(value) for name, value in info.items()} == hints
