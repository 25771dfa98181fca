"""One forward pass, every tensor held against float16: tap points, and what projections and experts take and give.

A tap point shows what leaves an op. What enters the last projection of an MLP or mixer is no op's result, it is made by
a product in front of it (silu(gate) up; attention times its gate), and the values inside the experts are seen by
nobody. `Watch` reads these too, from the kernels that the model calls.

With |x| the magnitude of a finite value, float16 makes of it on a cast

    overflow    infinity: |x| >= 65520, half a step above its largest number 65504
    flush       zero: 0 < |x| <= 2^-25, half of its smallest number
    subnormal   a number with fewer than 11 bits: 2^-25 < |x| < 2^-14
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

from workbench import taps
from workbench.analysis.nans import OP_OF_TAP, locate, relative_name
from workbench.kernels.outside import outside
from workbench.model import CausalLM
from workbench.numerics import LARGEST, SMALLEST_NORMAL

#: From here on a value rounds to infinity in float16; up to here to zero.
OVERFLOWS_FROM, FLUSHES_TO = 65520.0, 2.0**-25

#: Columns of `Watch.table`. `share` is absmax / 65504; `token`, `unit` and `expert` are those of the largest
#: magnitude, or of the first value that is not finite; `overflows`, `flushes` and `subnormals` count finite values as
#: above, `zeros` those that are zero already, `bad` those that are not finite.
COLUMNS = (
    "name", "layer", "op", "kind", "dtype", "values", "absmax", "share", "token", "unit", "expert", "overflows",
    "flushes", "subnormals", "zeros", "bad",
)  # fmt: skip

#: Kinds of tensors, one line each in a figure.
STREAM, NORMED, MIXER, RULE, PRODUCT, MLP, HEAD = (
    "residual stream", "after a norm", "mixer", "inside the mixer's op", "input of a last projection", "MLP", "head",
)  # fmt: skip

KIND_OF_TAP = {
    **dict.fromkeys(taps.LAYER_TAPS, MIXER),
    **dict.fromkeys((*taps.STAGES, taps.GDN_STATE), RULE),
    **dict.fromkeys((taps.EMBED, taps.RESIDUAL_MID, taps.RESIDUAL), STREAM),
    **dict.fromkeys((taps.INPUT_NORM, taps.POST_NORM, taps.FINAL_NORM), NORMED),
    **dict.fromkeys((taps.MOE_LOGITS, taps.MOE_TOPK, taps.MOE_EXPERTS, taps.MOE_SHARED, taps.MOE_OUT), MLP),
    taps.LOGITS: HEAD,
}

#: Projections whose input no tap point shows, and those whose output none shows.
HIDDEN_INPUTS = ("down_proj", "o_proj", "out_proj")
HIDDEN_OUTPUTS = ("q_proj", "k_proj", "gate_proj", "up_proj", "in_proj_a", "in_proj_b", "shared_expert_gate",
                  "shared_expert.down_proj")  # fmt: skip


@dataclass(slots=True)
class Reading:
    """What was seen of one tensor; of several under one name (experts) the sums, and the place of the largest."""

    name: str
    layer: int | None
    op: str
    kind: str
    dtype: str
    values: int = 0
    absmax: float = -1.0
    token: int | None = None
    unit: int | None = None
    expert: int | None = None
    overflows: int = 0
    flushes: int = 0
    subnormals: int = 0
    zeros: int = 0
    bad: int = 0
    index: tuple[int, ...] | None = None  # of the largest magnitude, or of the first value that is not finite
    shape: tuple[int, ...] = ()

    def add(self, x: Tensor, **place: Any) -> None:
        """Count the values of `x`; `place` holds attributes that are taken over with its largest magnitude."""
        if not x.numel():
            return
        finite = x.isfinite()
        magnitude = x.detach().abs().masked_fill(~finite, 0.0)
        top = int(magnitude.argmax())
        largest = magnitude.flatten()[top]
        counts = torch.stack([
            (magnitude >= OVERFLOWS_FROM).sum(), ((magnitude > 0) & (magnitude <= FLUSHES_TO)).sum(),
            ((magnitude > FLUSHES_TO) & (magnitude < SMALLEST_NORMAL["float16"])).sum(), (x == 0).sum(),
            (~finite).sum(),
        ])  # fmt: skip
        overflows, flushes, subnormals, zeros, bad = counts.tolist()
        if bad:
            top = int((~finite).flatten().int().argmax())
        is_first_bad = bool(bad) and not self.bad
        self.values += x.numel()
        self.overflows, self.flushes, self.subnormals = (
            self.overflows + overflows, self.flushes + flushes, self.subnormals + subnormals
        )  # fmt: skip
        self.zeros += zeros
        self.bad += bad
        larger = float(largest) > self.absmax
        self.absmax = max(self.absmax, float(largest))
        if is_first_bad or (larger and not (self.bad and self.index is not None)):
            self.index = tuple(int(i) for i in torch.unravel_index(torch.tensor(top), x.shape))
            self.shape = tuple(x.shape)
            for key, value in place.items():
                setattr(self, key, value(self.index) if callable(value) else value)


@dataclass(slots=True)
class Watch:
    """What one pass of a model showed, in the order of computation.

    `channels` holds for the inputs of last projections and what they are made of the largest magnitude per channel,
    [width] or, of experts, [E, width], zero for an expert that no token chose. `log_decays` are the gates, by tap name;
    `routes` the experts [tokens, A] that each router chose, in the order of the layers.
    """

    readings: dict[str, Reading] = field(default_factory=dict)
    channels: dict[str, Tensor] = field(default_factory=dict)
    log_decays: dict[str, Tensor] = field(default_factory=dict)
    routes: list[Tensor] = field(default_factory=list)
    shape: tuple[int, int] = (1, 1)

    def see(self, name: str, layer: int | None, op: str, kind: str, x: Tensor, **place: Any) -> Reading:
        dtype = str(x.dtype).removeprefix("torch.")
        found = self.readings.setdefault(name, Reading(name, layer, op, kind, dtype))
        found.add(x, **place)
        return found

    def see_rows(self, name: str, layer: int | None, op: str, kind: str, x: Tensor, **place: Any) -> None:
        """`x` [..., width] with all tokens in its leading axes; keeps what channels need."""
        rows = x.detach().reshape(-1, x.shape[-1])
        self.see(name, layer, op, kind, rows,
                 token=lambda index: index[0] % self.shape[1], unit=lambda index: index[1], **place)  # fmt: skip
        self.channels[name] = rows.abs().nan_to_num(posinf=0.0).amax(0).float()

    @property
    def table(self) -> pd.DataFrame:
        """A row for each tensor, columns as in COLUMNS."""
        rows = []
        seen = pd.DataFrame([{"step": 0, "tap": taps.EMBED, "shape": (*self.shape, 1)}])
        for found in self.readings.values():
            token = found.token
            if token is None and found.index is not None and relative_name(found.name) in OP_OF_TAP:
                place = pd.Series({"tap": found.name, "first_bad": found.index, "shape": found.shape, "step": 0})
                token = locate(place, seen).token
            share = found.absmax / LARGEST["float16"]
            rows.append((found.name, found.layer, found.op, found.kind, found.dtype, found.values, found.absmax, share,
                         token, found.unit, found.expert, found.overflows, found.flushes, found.subnormals,
                         found.zeros, found.bad))  # fmt: skip
        whole = dict.fromkeys(("layer", "token", "unit", "expert"), "Int64")
        return pd.DataFrame(rows, columns=list(COLUMNS)).astype(whole)


class WatchTap:
    """The tap of a `Watch`; returns every tensor as it came."""

    sees_inside = True

    def __init__(self, watch: Watch, prefix: str = ""):
        self.watch, self.prefix = watch, prefix

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        full = self.prefix + name
        layer, relative = taps.split_name(full)
        if full == taps.EMBED:
            self.watch.shape = tuple(tensor.shape[:2])
        if tensor.is_floating_point():
            self.watch.see(full, layer, OP_OF_TAP[relative], KIND_OF_TAP[relative], tensor)
        if relative == taps.GDN_LOG_DECAY:
            self.watch.log_decays[full] = tensor.detach().clone()
        if relative == taps.ATTN_V:
            self.watch.channels[full] = tensor.detach().flatten(2).flatten(0, 1).abs().nan_to_num(posinf=0.0).amax(0)
        return tensor

    def scope(self, prefix: str) -> WatchTap:
        return WatchTap(self.watch, self.prefix + prefix)


def tap_style(parameter: str) -> str:
    """``layers.3.mlp.down_proj.weight`` as ``layers.03.mlp.down_proj``."""
    name = parameter.removesuffix(".weight")
    return re.sub(r"^layers\.(\d+)\.", lambda found: taps.full_name(int(found[1]), ""), name)


class WatchKernels:
    """A model's kernels; projections and experts are read before and after, whatever backend serves them.

    What it computes itself is outside of the limits of a card that the model rehearses.
    """

    def __init__(self, model: CausalLM, watch: Watch):
        self._kernels, self._watch = model.kernels, watch
        self._weights: dict[tuple[int, int], list[tuple[str, int]]] = {}
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                self._weights[parameter.data_ptr(), parameter.shape[0]] = [(tap_style(name), parameter.shape[0])]
        names = {id(parameter): tap_style(name) for name, parameter in model.named_parameters()}
        for module in model.modules():
            joint = getattr(module, "joint", None)
            if joint is not None and joint.matrix is not None:
                parts = [(names[id(layer.weight)], layer.out_features) for layer in joint.layers]
                self._weights[joint.matrix.data_ptr(), joint.matrix.shape[0]] = parts
        self._experts = {
            parameter.data_ptr(): tap_style(name).removesuffix(".gate_up_proj")
            for name, parameter in model.named_parameters() if name.endswith(".experts.gate_up_proj")
        }  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        out = self._kernels.linear(x, weight)
        with outside():
            self._see_linear(x, weight, out)
        return out

    def _see_linear(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        parts = self._weights.get((weight.data_ptr(), weight.shape[0]), [])
        for (name, _), y in zip(parts, out.split([rows for _, rows in parts], -1) if parts else (), strict=True):
            layer, relative = taps.split_name(name)
            if layer is None:
                continue
            if relative.endswith(HIDDEN_INPUTS):
                self._watch.see_rows(f"{name}.input", layer, relative.partition(".")[2], PRODUCT, x)
            if relative.endswith(HIDDEN_OUTPUTS):
                kind = MLP if relative.startswith("mlp") else MIXER
                self._watch.see_rows(f"{name}.output", layer, relative.partition(".")[2], kind, y)

    def routing(self, logits: Tensor, **settings: Any) -> tuple[Tensor, Tensor]:
        weights, experts = self._kernels.routing(logits, **settings)
        self._watch.routes.append(experts)
        return weights, experts

    def experts(
        self, x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, **settings: Any
    ) -> Tensor:
        name = self._experts.get(gate_up.data_ptr())
        layer, _ = taps.split_name(name) if name is not None else (None, "")
        if layer is not None:
            with outside():
                see_experts(self._watch, name, layer, x, experts, gate_up, down)
        return self._kernels.experts(x, weights, experts, gate_up, down, **settings)


def see_experts(
    watch: Watch, name: str, layer: int, x: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor
) -> None:
    """What passes through each expert that is hit, computed once more from what all of them are given.

    x [tokens, D]; experts [tokens, A]; weights as in `experts.spec`.
    """
    count, width = gate_up.shape[0], gate_up.shape[1] // 2
    seen = {
        f"{name}.gate_proj.output": MLP, f"{name}.up_proj.output": MLP, f"{name}.down_proj.input": PRODUCT,
        f"{name}.down_proj.output": MLP,
    }  # fmt: skip
    largest = {key: torch.zeros(count, width) for key in list(seen)[1:3]}
    for expert in experts.unique().tolist():
        token = (experts == expert).any(-1).nonzero().squeeze(1)
        gate, up = F.linear(x[token], gate_up[expert]).split(width, -1)
        hidden = F.silu(gate).mul_(up)
        values = gate, up, hidden, F.linear(hidden, down[expert])
        tokens = token.tolist()
        for (key, kind), y in zip(seen.items(), values, strict=True):
            op = "experts." + key.removeprefix(f"{name}.").partition(".")[0]
            watch.see(key, layer, op, kind, y, expert=expert, unit=lambda index: index[1],
                      token=lambda index, tokens=tokens: tokens[index[0]] % watch.shape[1])  # fmt: skip
            if key in largest:
                largest[key][expert] = y.abs().nan_to_num(posinf=0.0).amax(0).float().cpu()
    watch.channels |= largest


@contextmanager
def watched(model: CausalLM) -> Iterator[Watch]:
    """Every pass of `model` inside the context is read into one `Watch`; the model has its tap and kernels back after.

    A tap that the model has is set aside meanwhile: it may change what the ops are given.
    """
    watch = Watch()
    tap, kernels = model.tap, model.kernels
    model.tap, model.kernels = WatchTap(watch), WatchKernels(model, watch)
    try:
        yield watch
    finally:
        model.tap, model.kernels = tap, kernels


# ---- the same experts in two runs


class RoutedKernels:
    """A model's kernels, whose routers choose what `routes` say and weigh it by their own logits.

    Two runs that differ by roundings alone choose other experts wherever two logits all but tie, and are then far
    apart for no fault of either; with the same experts they are as close as their arithmetic.
    """

    def __init__(self, kernels: Any, routes: Iterable[Tensor]):
        self._kernels, self._routes = kernels, iter(routes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def routing(self, logits: Tensor, *, normalise: bool, **settings: Any) -> tuple[Tensor, Tensor]:
        weights, _ = self._kernels.routing(logits, normalise=normalise, **settings)
        experts = next(self._routes)
        dtype = self._kernels.router_dtype or torch.promote_types(logits.dtype, torch.float32)
        with outside():
            chosen = torch.softmax(logits.to(dtype), dim=-1).gather(-1, experts)
            return (chosen / chosen.sum(-1, keepdim=True) if normalise else chosen).to(weights.dtype), experts


@contextmanager
def routed(model: CausalLM, routes: Iterable[Tensor]) -> Iterator[None]:
    """The next pass of `model` goes to the experts in `routes`, those of each sparse layer in their order."""
    kernels = model.kernels
    model.kernels = RoutedKernels(kernels, routes)
    try:
        yield
    finally:
        model.kernels = kernels


# ---- the rounding of float16 without its range


def round_to_half_bits(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """float32 values with the 11 significant bits of float16 and the range of float32; other dtypes as they are.

    To nearest, ties to even; with a `generator` up or down at random, with probabilities that keep the mean.
    """
    if x.dtype != torch.float32:
        return x
    bits = x.contiguous().view(torch.int32)
    if generator is None:
        bits = bits + 0xFFF + ((bits >> 13) & 1)
    else:
        bits = bits + torch.randint(0, 0x2000, bits.shape, generator=generator, dtype=torch.int32).to(x.device)
    return torch.where(x.isfinite(), (bits & ~0x1FFF).view(torch.float32), x)


class RoundingTap:
    """Gives back what each tap point in `names` shows, with the bits of float16."""

    sees_inside = False

    def __init__(self, names: Collection[str], generator: torch.Generator | None, prefix: str = ""):
        self.names, self.generator, self.prefix = names, generator, prefix

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        return round_to_half_bits(tensor, self.generator) if self.prefix + name in self.names else tensor

    def scope(self, prefix: str) -> RoundingTap:
        return RoundingTap(self.names, self.generator, self.prefix + prefix)


class RoundingKernels:
    """A model's kernels, whose projections and experts take and give values with the bits of float16."""

    def __init__(self, model: CausalLM, generator: torch.Generator | None):
        self._kernels, self._generator = model.kernels, generator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def _round(self, x: Tensor) -> Tensor:
        return round_to_half_bits(x, self._generator)

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._round(self._kernels.linear(self._round(x), weight))

    def experts(
        self, x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, *, watch: Any = None
    ) -> Tensor:  # no kernel runs here that could raise flags for `watch`: it reads the result itself
        x, out, width = self._round(x), torch.zeros_like(x), gate_up.shape[1] // 2
        for expert in experts.unique().tolist():
            token, rank = (experts == expert).nonzero(as_tuple=True)
            gate, up = self._round(F.linear(x[token], gate_up[expert])).split(width, -1)
            hidden = self._round(self._round(F.silu(gate)) * up)
            out.index_add_(0, token, self._round(F.linear(hidden, down[expert])) * weights[token, rank, None])
        return self._round(out)


@contextmanager
def rounded(model: CausalLM, names: Collection[str], seed: int | None = None) -> Iterator[None]:
    """A float32 `model` rounds as float16 would, with no limit to its range, wherever `names` says that it holds it.

    `names` are full names of tap points; projections and experts round in any case. `seed` rounds at random.
    """
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    tap, kernels = model.tap, model.kernels
    model.tap, model.kernels = RoundingTap(names, generator), RoundingKernels(model, generator)
    try:
        yield
    finally:
        model.tap, model.kernels = tap, kernels
