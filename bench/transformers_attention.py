# SPDX-License-Identifier: Apache-2.0
# bench/transformers_attention.py: attention of long prompts for bench/transformers_models.py. gpt-oss' eager attention has all scores in
# memory at once, 32 GB for 16384 tokens.
"""Ways to run a long prompt through gpt-oss, the same for every implementation of the experts. Neither splits the rows that the experts
get.

flex_attention: transformers' own, for GPUs, through torch.compile and Triton.
pieces: the model's eager attention, a piece of the rows after another, each with the keys that it may see."""
import contextlib

import torch
from transformers.models.gpt_oss import modeling_gpt_oss

MOST_SCORES = 2**31  # of eager attention in one piece
PIECE = 2**29  # scores of a piece; eager attention has some five arrays of so many
BOUND = 0.2  # of a row. flex_attention rounds the logarithm of a row's sum to bfloat16, which changes the row by up to 6 %


def in_pieces(eager, most):
    """The attention function `eager`, in pieces of at most `most` scores."""

    def forward(module, query, key, value, attention_mask, *settings, **more):
        batch, heads, rows, keys = *query.shape[:3], key.shape[2]
        step = max(1, most // (batch * heads * keys))
        if attention_mask is None or rows != keys or rows <= step:
            return eager(module, query, key, value, attention_mask, *settings, **more)
        outputs = []
        for first in range(0, rows, step):
            last = min(first + step, rows)
            outputs.append(eager(module, query[:, :, first:last], key[:, :, :last], value[:, :, :last],
                                 attention_mask[:, :, first:last, :last], *settings, **more)[0])
        return torch.cat(outputs, 1), None

    return forward


@contextlib.contextmanager
def pieces(_models):
    eager = modeling_gpt_oss.eager_attention_forward
    modeling_gpt_oss.eager_attention_forward = in_pieces(eager, PIECE)
    try:
        yield
    finally:
        modeling_gpt_oss.eager_attention_forward = eager


@contextlib.contextmanager
def flex_attention(models):
    before = [(model, model.config._attn_implementation) for model in models]
    try:
        for model in models:
            model.set_attn_implementation("flex_attention")
            if model.config._attn_implementation != "flex_attention":
                raise RuntimeError(f"transformers left attention at {model.config._attn_implementation}")
        yield
    finally:
        for model, name in before:
            model.set_attn_implementation(name)


@contextlib.contextmanager
def as_it_is(_models):
    yield


def ways():
    return {"eager": as_it_is, "flex_attention": flex_attention, "pieces": pieces}


@torch.no_grad()
def attention_alone(model, ids):
    """[T, H]: the last layer's output where no experts add to it."""
    found = []
    handles = [layer.mlp.register_forward_hook(lambda _module, _inputs, output: (torch.zeros_like(output[0]), *output[1:]))
               for layer in model.model.layers]
    handles.append(model.model.layers[-1].register_forward_hook(
        lambda _module, _inputs, output: found.append(output[0] if isinstance(output, tuple) else output)))
    try:
        model.model(input_ids=ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return found[0].reshape(-1, found[0].shape[-1]).float()


def apart(model, ids):
    """The largest difference of a row under flex_attention from the same row of eager attention, relative to the row."""
    with pieces([model]):
        expected = attention_alone(model, ids)
    with ways()["flex_attention"]([model]):
        got = attention_alone(model, ids)
    return float(((got - expected).norm(dim=1) / expected.norm(dim=1)).max())


def choose(model, ids, wanted, reason_of):
    """(the way to run these tokens, why it is not flex_attention). "auto": as the model is where all scores fit, else flex_attention where
    it runs and agrees with eager attention, else pieces. reason_of: a text for an exception."""
    scores = model.config.num_attention_heads * ids.shape[0] * ids.shape[1] ** 2
    if wanted != "auto":
        return wanted, None
    if model.config._attn_implementation != "eager" or scores <= MOST_SCORES:
        return "eager", None
    try:
        found = apart(model, ids)
    except Exception as error:  # no Triton, no compiler, no such attention
        return "pieces", reason_of(error)
    if not found <= BOUND:
        return "pieces", f"a row is {found:.3g} from that of eager attention, of at most {BOUND}"
    return "flex_attention", None
