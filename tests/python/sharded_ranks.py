# SPDX-License-Identifier: Apache-2.0
# tests/python/sharded_ranks.py: one rank of a transformers model that is sharded over processes of the host, started by
# test_transformers_sharded.py.
"""sharded_ranks.py RANK SIZE FOLDER. FOLDER holds a checkpoint and the logits of the unsharded eager model for each name."""

from __future__ import annotations

import datetime
import os
import pathlib
import sys
import warnings

import families
import torch
import transformers
from transformers.distributed import DistributedConfig

import moe
import moe.transformers as adapter

#: Of float32 logits: as far as the orders of the sums differ, measured up to 2.1e-6. `check_that_errors_show` shows what it separates.
BOUND = 2e-5
#: What a sharded model with an error is at least away; measured 0.9 and more.
WRONG = 1e-2
LAYERS = 2

rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3])
calls: list[torch.Tensor] = []  # the expert ids of each call of the library


def distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).abs().max() / expected.double().abs().max())


def expected_of(name: str) -> torch.Tensor:
    return torch.load(folder / f"{name}.pt")


def load(name: str, **fields) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder / name, experts_implementation="moe", dtype=torch.float32, distributed_config=DistributedConfig(**fields)
    )


def unsharded(path: pathlib.Path) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(path, experts_implementation="eager", dtype=torch.float32)


def check(name: str, sequence: int | None = None, keeps_runners: bool = True, **fields) -> torch.nn.Module:
    """Loads a model and runs it twice. Both times every layer runs on the library, and the logits are the unsharded model's.
    sequence: the only one that this rank gets; None: all."""
    model = load(name, **fields)
    expected = expected_of(name) if sequence is None else expected_of(name)[sequence : sequence + 1]
    layers = []
    for _ in range(2):
        calls.clear()
        far = distance(families.logits(model, sequence), expected)
        assert far < BOUND, (name, fields, rank, far)
        reasons = {adapter.why_not(module) for module in families.experts(model)}
        assert reasons == {None} and len(calls) == LAYERS, (name, fields, rank, reasons, len(calls))
        layers.append([module.__dict__["_moe_layer"] for module in families.experts(model)])
    if keeps_runners:
        assert all(first is second for first, second in zip(*layers)), f"{name} {fields}: the second forward made other runners"
    if fields.get("ep_size", 1) > 1:
        assert {module.num_experts for module in families.experts(model)} == {8 // size}
    print(f"rank {rank} of {size}: {name} {fields}: {far:.1e}", flush=True)
    return model


def local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def check_that_errors_show(model: torch.nn.Module, name: str) -> None:
    """The bound separates what it must: a rank whose experts do not count, and a rank with its experts in another order."""
    expected, forward = expected_of(name), adapter._layer.Layer.forward
    if rank == size - 1:
        adapter._layer.Layer.forward = lambda *arguments: torch.zeros_like(forward(*arguments))
    far = distance(families.logits(model), expected)
    adapter._layer.Layer.forward = forward
    print(f"rank {rank} of {size}: {name} without the last rank's experts: {far:.1e}", flush=True)
    assert far > WRONG
    with torch.no_grad():
        if rank == size - 1:
            for module in families.experts(model):
                local(module.down_proj).copy_(local(module.down_proj).flip(0))
    far = distance(families.logits(model), expected)
    print(f"rank {rank} of {size}: {name} with the last rank's experts in another order: {far:.1e}", flush=True)
    assert far > WRONG


def all_reduce() -> None:
    """Every rank has all tokens, and its own experts; ids of others' experts lie past the last one."""
    for name in ("mixtral", "qwen3_moe", "mxfp4", "gpt_oss"):
        model = check(name, tp_size=size, ep_size=size)
        assert all(bool((ids == -1).any()) and bool((ids >= 0).any()) for ids in calls), "no expert of another rank, or none of its own"
        if name == "mxfp4":
            try:
                model.save_pretrained(folder / "refused")
            except moe.UnsupportedError as error:
                assert "own experts only" in str(error)
            else:
                raise AssertionError("a rank saved the codes of its own experts as if they were all")
        elif name == "gpt_oss":  # stored transposed: what has run is saved as it was
            model.save_pretrained(folder / "saved")
            torch.distributed.barrier()
            assert distance(families.logits(unsharded(folder / "saved")), expected_of(name)) < BOUND
        else:
            check_that_errors_show(model, name)
    check("few", tp_size=size, ep_size=size)
    idle = rank >= size // 2
    assert all(bool((ids >= 0).any()) != idle for ids in calls), "the tokens of this checkpoint choose experts of the first half only"


def all_to_all() -> None:
    """Each rank gets the tokens that choose its experts; where none does, transformers hands it one row."""
    for name in ("qwen3_moe", "gpt_oss", "mxfp4"):
        check(name, tp_size=size, ep_size=size, ep_implementation="all_to_all")
        assert all(ids.shape[1] == 1 and int(ids.min()) >= 0 for ids in calls)
    check("few", tp_size=size, ep_size=size, ep_implementation="all_to_all")
    assert rank < size // 2 or [tuple(ids.shape) for ids in calls] == [(1, 1)] * LAYERS


def tensor_parallel() -> None:
    """Every rank has a part of each expert."""
    check_that_errors_show(check("qwen3_moe", tp_size=size), "qwen3_moe")


def fully_sharded() -> None:
    """Each rank has its own sequence. Weights are gathered anew for each forward, into memory that the library must not keep a copy of."""
    check("qwen3_moe", sequence=rank % 2, keeps_runners=False, fsdp_size=size, ep_size=size)
    model = load("gpt_oss", fsdp_size=size)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert distance(families.logits(model), expected_of("gpt_oss")) < BOUND
    assert [w for w in caught if issubclass(w.category, adapter.FallbackWarning)], "no warning of the fallback"
    assert all("fully_shard" in adapter.why_not(module) for module in families.experts(model))
    other = unsharded(folder / "gpt_oss")
    with torch.no_grad():
        for module in families.experts(model) + families.experts(other):
            module.down_proj.mul_(-0.7)
    changed = families.logits(other)
    assert distance(families.logits(model), changed) < BOUND and distance(changed, expected_of("gpt_oss")) > WRONG
    try:
        load("mxfp4", fsdp_size=size)
    except moe.UnsupportedError as error:
        assert "fully_shard" in str(error)
    else:
        raise AssertionError("fully_shard took codes that it cannot gather")


def main() -> None:
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=(folder / f"ranks{size}").as_uri(), rank=rank, world_size=size, timeout=datetime.timedelta(seconds=60)
    )
    warnings.simplefilter("error", adapter.FallbackWarning)
    forward_routed = moe.Runner.forward_routed

    def spied(self, hidden, ids, *more):
        calls.append(ids)
        return forward_routed(self, hidden, ids, *more)

    moe.Runner.forward_routed = spied
    all_reduce()
    all_to_all()
    if size == 2:
        tensor_parallel()
        fully_sharded()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    print(f"rank {rank} of {size}: good", flush=True)


if __name__ == "__main__":
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    main()
