# SPDX-License-Identifier: Apache-2.0
# tests/python/typed_program.py: a user's program, which test_type_checker.py checks and does not run. A comment "type: ignore" says what a
# wrong call must be refused for.
from typing import assert_type

import numpy as np

import moe

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


def right(hidden: Floats, w13: Floats, w2: Floats, logits: Floats) -> Floats:
    ids, weights = moe.route(logits, 2, renorm="sum")
    assert_type(moe.experts(hidden, ids, weights, w13, w2), Floats)
    with moe.Runner(w13, w2, topk=2, max_tokens=16, router={"scoring": "sigmoid"}) as runner:
        assert_type(runner.forward(hidden, logits), Floats)
        assert_type(runner.forward_routed(hidden, ids, weights), Floats)
        assert_type(runner.weights_packed, bool)
        assert_type(runner.info["bytes"], int)
    return moe.experts(hidden, ids, weights, w13, w2)


def wrong(hidden: Floats, w13: Floats, w2: Floats) -> None:
    moe.experts(hidden, [1], hidden, w13, w2)  # type: ignore[arg-type]
    moe.experts(hidden, hidden, hidden, w13, w2, activation=3)  # type: ignore[arg-type]
    moe.experts(hidden, hidden, hidden, w13)  # type: ignore[call-arg]
    moe.Runner(w13, w2, topk="2", max_tokens=16)  # type: ignore[arg-type]
    moe.Runner(w13, w2, max_tokens=16)  # type: ignore[call-arg]
