# SPDX-License-Identifier: Apache-2.0
# bench/compare_layers.py: the layers that bench/compare.py gives to every candidate: random weights in each element type, inputs, float32
# by definition, and the check of a candidate's results. Runs on any device of torch.
import dataclasses
import importlib

import torch
from compare_table import DTYPES, tolerance

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_LIMITS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between two neighbours


class Unavailable(Exception):
    """The candidate cannot run this layer; the text says why."""


class Wrong(Exception):
    """The candidate's result differs from float32 by more than its bound."""


class Candidate:
    """What is timed. A peer is one subclass: how it stores the weights, one call, and what it needs."""

    name = ""
    whole = True  # the whole layer is timed; else its two products alone
    dtypes = ()
    modules = ("torch",)  # that must be importable
    obtained = ""  # how they are obtained

    def activations(self, dtype):
        """What the products read: bf16, fp8 (e4m3 codes, a scale per 128) or int8 (a scale per row)."""
        return DTYPES[dtype].activations

    def load(self):
        """Imports the modules. Any exception says that the candidate is missing."""
        return [importlib.import_module(name) for name in self.modules]

    def refuses(self, layer, tokens):
        """Why this layer is not run, or None."""
        return None

    def prepare(self, layer):
        """The weights as the candidate stores them, once per layer. close() of the result, if there is one, releases it."""
        return layer

    def call(self, prepared, layer, batch):
        """A function without arguments that enqueues one layer and returns its output, or Products."""
        raise NotImplementedError


@dataclasses.dataclass
class Products:
    """Two grouped products: run() enqueues them, outputs() gives both results in the order of `rows`. `owners`: each row's expert."""

    run: object
    rows: torch.Tensor
    owners: torch.Tensor
    inner: torch.Tensor | None  # what the second product reads; None: outputs() gives it, too
    outputs: object
    as_read: object = None  # of rows and inner, in float32; None: as they are
    weight: object = None  # of (name, expert), in float32; None: the layer's

    def __call__(self):
        return self.run()


@dataclasses.dataclass(frozen=True)
class Activation:
    """y = (clamp(up, +-limit) + beta) g sigmoid(alpha g), g = min(gate, limit). alpha 1, beta 0, no limit: SwiGLU."""

    alpha: float = 1.0
    beta: float = 0.0
    limit: float | None = None

    def __call__(self, h):
        gate, up = h.chunk(2, dim=-1)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + self.beta)


SWIGLU = Activation()
GPT_OSS = Activation(1.702, 1.0, 7.0)


def quantize_groups(x, group=128):
    """e4m3 codes and scales of groups along the last axis, whose last group may be shorter."""
    columns = x.shape[-1]
    padded = torch.nn.functional.pad(x.float(), (0, -columns % group))
    groups = padded.unflatten(-1, (-1, group))
    # Divides by a tensor: for a Python number, torch multiplies by the reciprocal. A scale that differs in its last bit changes codes,
    # because quotients of bf16 numbers often lie midway between two codes.
    scale = groups.abs().amax(dim=-1, keepdim=True).clamp(min=1e-10) / torch.tensor(448.0, device=x.device)
    codes = (groups / scale).to(torch.float8_e4m3fn).flatten(-2)[..., :columns].contiguous()
    return codes, scale.squeeze(-1).contiguous()


def quantize_rows(x):
    scale = x.float().abs().amax(dim=-1, keepdim=True).clamp(min=1e-10) / 448.0
    return (x.float() / scale).to(torch.float8_e4m3fn), scale.squeeze(-1)


def quantize_int8(x):
    """int8 codes and scales of rows along the last axis. Divides by a tensor, as quantize_groups does."""
    scale = x.float().abs().amax(dim=-1, keepdim=True).clamp(min=1e-10) / torch.tensor(127.0, device=x.device)
    return (x.float() / scale).round().clamp(-127, 127).to(torch.int8), scale.squeeze(-1)


def as_read(activations, v):
    """Rows as products with such activations read them, in float32."""
    if activations == "bf16":
        return v.float()
    if activations == "int8":
        codes, scale = quantize_int8(v)
        return codes.float() * scale.unsqueeze(-1)
    codes, scale = quantize_groups(v)
    return codes.float() * scale.repeat_interleave(128, -1)[..., : v.shape[-1]]


def pack_nibbles(codes):
    """Two codes of 4 bits a byte, the first one low."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed):
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def e2m1_codes(v):
    """The nearest code of each value; larger magnitudes than 6 become 6."""
    magnitude = torch.bucketize(v.abs(), torch.tensor(E2M1_LIMITS, device=v.device)).to(torch.uint8)
    return magnitude | ((v < 0).to(torch.uint8) << 3)


def e2m1_values(codes):
    table = torch.tensor(E2M1 + tuple(-v for v in E2M1), device=codes.device)
    return table[codes.long()]


def quantize_weight(w, dtype):
    """(codes, scales, global scale or None) of one expert's float32 matrix. Scales are numbers of 8 bits of mantissa or fewer, so that
    every candidate's form of them is exact."""
    if dtype == "bf16":
        return w.to(torch.bfloat16), None, None
    if dtype == "fp8":
        n, k = w.shape
        tiles = w.view(n // 128, 128, k // 128, 128)
        scale = tiles.abs().amax(dim=(1, 3)).clamp(min=1e-10) / 448.0
        return (tiles / scale[:, None, :, None]).to(torch.float8_e4m3fn).view(n, k), scale, None
    if dtype == "int8":
        scale = (w.abs().amax(dim=-1) / 127.0).clamp(min=1e-10).bfloat16().float()
        return (w / scale[:, None]).round().clamp(-127, 127).to(torch.int8), scale, None
    groups = w.unflatten(-1, (-1, DTYPES[dtype].group))
    most = groups.abs().amax(dim=-1, keepdim=True)
    total = None
    if dtype == "mxfp4":  # OCP: the exponent of the largest magnitude less that of 6
        exponent = torch.floor(torch.log2(most.clamp(min=2.0**-100))) - 2
        codes, scale = e2m1_codes(groups / torch.exp2(exponent)), (exponent + 127).to(torch.uint8)
    elif dtype == "nvfp4":
        total = (w.abs().amax() / (6.0 * 448.0)).clamp(min=1e-20)
        scale = (most / 6.0 / total).clamp(min=2.0**-6).to(torch.float8_e4m3fn)
        codes = e2m1_codes(groups / (scale.float() * total))
    else:
        scale = (most / 7.0).clamp(min=1e-10).bfloat16().float()
        codes = ((groups / scale).round().clamp(-8, 7) + 8).to(torch.uint8)
    return pack_nibbles(codes.flatten(-2)), scale.squeeze(-1), total


class Layer:
    """Random weights of one shape, quantised from seeded float32 numbers, the same for every candidate. w13 [E, 2I, H] (gate rows before up
    rows), w2 [E, H, I]; of 4 bits two codes a byte. s13, s2: float32 scales per row, group or block; mxfp4: exponent bytes; nvfp4: e4m3,
    and g13, g2 [E] in float32. b13, b2: biases of gpt-oss's layers in 4 bits, else None."""

    def __init__(self, shape, dtype, *, device="cuda", gpt_oss=False, seed=1):
        self.experts, self.hidden, self.inter, self.topk = shape
        self.dtype, self.device = dtype, torch.device(device)
        biased = gpt_oss and DTYPES[dtype].packed
        self.activation = GPT_OSS if biased else SWIGLU
        self.rows_ = {}
        generator = torch.Generator(device=self.device).manual_seed(seed)
        self.w13, self.s13, self.g13 = self._matrices(2 * self.inter, self.hidden, generator)
        self.w2, self.s2, self.g2 = self._matrices(self.hidden, self.inter, generator)
        self.b13 = self._bias(2 * self.inter, generator) if biased else None
        self.b2 = self._bias(self.hidden, generator) if biased else None

    @property
    def fp8(self):
        return self.dtype == "fp8"

    def _matrices(self, rows, cols, generator):
        """One expert at a time: the float32 numbers of all are large."""
        kept = [None] * 3
        for e in range(self.experts):
            w = torch.randn(rows, cols, device=self.device, generator=generator) * cols**-0.5
            for i, part in enumerate(quantize_weight(w, self.dtype)):
                if part is None:
                    continue
                if kept[i] is None:
                    kept[i] = torch.empty(self.experts, *part.shape, device=self.device, dtype=part.dtype)
                kept[i][e] = part
        return kept

    def _bias(self, rows, generator):
        """Numbers of bf16, which some candidates store them in."""
        return torch.randn(self.experts, rows, device=self.device, generator=generator).bfloat16().float()

    def columns(self, name):
        return self.hidden if name == "w13" else self.inter

    def group(self, name):
        return DTYPES[self.dtype].group or self.columns(name)

    def weight(self, name, expert):
        """One expert's weights as float32."""
        codes, scale = getattr(self, name)[expert], getattr(self, "s" + name[1:])
        if self.dtype == "bf16":
            return codes.float()
        scale = scale[expert]
        if self.dtype == "fp8":
            return codes.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        if self.dtype == "int8":
            return codes.float() * scale[:, None]
        values = unpack_nibbles(codes)
        values = values.float() - 8 if self.dtype.startswith("int4") else e2m1_values(values)
        if self.dtype == "mxfp4":
            scale = torch.exp2(scale.float() - 127)
        if self.dtype == "nvfp4":
            scale = scale.float() * getattr(self, "g" + name[1:])[expert]
        return values * scale.repeat_interleave(self.group(name), -1)

    def stored_scales(self, name):
        """The scales as W4Weights of experts/hopper/w4/problem.hpp holds them."""
        scales = getattr(self, "s" + name[1:])
        if self.dtype != "nvfp4":
            return scales
        bytes_ = scales.view(torch.uint8).flatten(1)
        bytes_ = torch.nn.functional.pad(bytes_, (0, -bytes_.shape[1] % 4))
        total = getattr(self, "g" + name[1:]).reshape(-1, 1).contiguous().view(torch.uint8)
        return torch.cat((bytes_, total), dim=1).contiguous()

    def row_weights(self, name):
        """e4m3 codes and a scale per channel, of the same weights; made once."""
        if name not in self.rows_:
            parts = [quantize_rows(self.weight(name, e)) for e in range(self.experts)]
            self.rows_[name] = tuple(torch.stack(part) for part in zip(*parts))
        return self.rows_[name]


class Batch:
    """Random inputs of one call, the same for every candidate."""

    def __init__(self, layer, tokens, index, seed=2):
        device = layer.device
        generator = torch.Generator(device=device).manual_seed(seed * 1000 + index)
        self.x = torch.randn(tokens, layer.hidden, device=device, generator=generator).bfloat16()
        if tokens == 1:  # disjoint experts between sets, so that weights come from memory
            chosen = [[(index * layer.topk + j) * 5 % layer.experts for j in range(layer.topk)]]
            self.ids = torch.tensor(chosen, device=device, dtype=torch.int32)
        else:
            drawn = torch.rand(tokens, layer.experts, device=device, generator=generator)
            self.ids = drawn.topk(layer.topk, dim=1).indices.to(torch.int32).contiguous()
        self.weights = torch.softmax(torch.randn(tokens, layer.topk, device=device, generator=generator), dim=1).contiguous()
        self.out = torch.full((tokens, layer.hidden), float("nan"), device=device, dtype=torch.bfloat16)
        self.wanted = {}

    def sample(self):
        tokens = self.x.shape[0]
        return sorted({i * (tokens - 1) // 15 for i in range(16)})


def reference(layer, batch, activations):
    """float32 by definition for the sampled tokens, with the layer's dequantised weights; made once for each kind of activations."""
    if activations in batch.wanted:
        return batch.wanted[activations]
    sample = batch.sample()
    out = torch.zeros(len(sample), layer.hidden, device=layer.device)
    x = as_read(activations, batch.x[sample])
    chosen = batch.ids[sample].long()
    for e in sorted(set(chosen.flatten().tolist())):  # dequantises each expert once
        w13, w2 = layer.weight("w13", e), layer.weight("w2", e)
        at, slot = torch.nonzero(chosen == e, as_tuple=True)
        h = x[at] @ w13.t() + (0 if layer.b13 is None else layer.b13[e])
        y = as_read(activations, layer.activation(h)) @ w2.t() + (0 if layer.b2 is None else layer.b2[e])
        out.index_add_(0, at, batch.weights[sample][at, slot].unsqueeze(-1) * y)
    batch.wanted[activations] = out
    return out


def distance(got, want):
    return float((got.float() - want).norm() / want.norm())


def layer_error(candidate, layer, batch, call):
    """Relative distance of a whole layer's output from float32; NaN where something was not written."""
    want = reference(layer, batch, candidate.activations(layer.dtype))
    batch.out.fill_(float("nan"))
    got = call()
    return distance(got[batch.sample()], want) if torch.isfinite(got).all() else float("nan")


def product_error(layer, products):
    """Largest relative distance of either product over sampled rows."""
    products.run()
    outputs = products.outputs()
    inner = products.inner if len(outputs) == 2 else outputs[2]
    weight, read = products.weight or layer.weight, products.as_read or (lambda v: v.float())
    worst, count = 0.0, products.rows.shape[0]
    for i in sorted({k * (count - 1) // 7 for k in range(8)}):
        e = int(products.owners[i])
        for got, name, v in ((outputs[0][i], "w13", products.rows[i]), (outputs[1][i], "w2", inner[i])):
            error = distance(got, weight(name, e) @ read(v))
            worst = error if error > worst or error != error else worst
    return worst


def checked(candidate, layer, batch, call, ours):
    """The candidate's error; Wrong if it is over the bound."""
    if candidate.whole:
        error = layer_error(candidate, layer, batch, call)
    else:
        error = product_error(layer, call)
    most = tolerance(layer.dtype, candidate.activations(layer.dtype), batch.x.shape[0], ours, candidate.whole)
    if not error < most:
        raise Wrong(f"its result differs from float32 by {error:.1e}, at most {most:g} is right")
    return error
