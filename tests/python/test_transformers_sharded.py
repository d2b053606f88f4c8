# SPDX-License-Identifier: Apache-2.0
# tests/python/test_transformers_sharded.py: transformers models that are sharded over ranks, under experts_implementation="moe", each rank
# a process on the host (sharded_ranks.py).
import os
import pathlib
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("transformers.distributed.expert_parallel", reason="this transformers shards experts by another interface, before 5.21")
pytest.importorskip("accelerate", reason="accelerate, which transformers needs to shard a model, is not installed")

import moe  # noqa: E402

import families  # noqa: E402
import mxfp4  # noqa: E402
from processes import finish, start  # noqa: E402

PROGRAM = str(pathlib.Path(__file__).with_name("sharded_ranks.py"))
SECONDS = 400


def few_experts(model):
    """Every token chooses two experts of the first four: those of one sign in two pairs of opposite rows, all other logits being 0."""
    with torch.no_grad():
        for name, router in model.named_modules():
            if name.endswith("mlp.gate"):
                rows = torch.randn(2, router.weight.shape[1])
                router.weight.zero_()
                router.weight[:4] = torch.cat((rows, -rows))
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Checkpoints with the logits of the unsharded eager models; four heads of keys and values, so that four ranks can share them."""
    folder = tmp_path_factory.mktemp("sharded")
    models = {name: families.build(name, num_key_value_heads=4) for name in ("qwen3_moe", "mixtral", "gpt_oss")}
    models["few"] = few_experts(families.build("qwen3_moe", num_key_value_heads=4))
    for name, model in models.items():
        model.save_pretrained(folder / name)
    models["mxfp4"] = mxfp4.checkpoint(folder / "mxfp4", num_key_value_heads=4)
    for name, model in models.items():
        model.set_experts_implementation("eager")
        torch.save(families.logits(model), folder / f"{name}.pt")
    return folder


@pytest.mark.parametrize("size", [2, 4])
def test_ranks(size, folder):
    if not moe.has("onednn"):
        pytest.skip("libmoe was built without oneDNN, so that no experts run on the host")
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}  # transformers shards over GPUs where it sees one
    ranks = [start(sys.executable, PROGRAM, rank, size, folder, environment=environment) for rank in range(size)]
    output = finish(ranks, SECONDS)
    print(output)
    assert output.count(": good") == size
