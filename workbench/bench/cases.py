"""What is timed: a call of an op at a model's shape, its inputs drawn anew, the arbiter's answer, its least cost.

`moe_layer` is routing, alignment and experts as a model calls them one after another, `gdn_decode_in_place` the op
gdn_decode where state and window are updated where they lie; every other case is one op.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from workbench.analysis.costs import WIDTH, delta_rule_flops
from workbench.bench.shapes import Shape
from workbench.errors import InputError
from workbench.kernels import Kernels
from workbench.kernels.conformance import CONTRACTS
from workbench.kernels.contract import Contract
from workbench.kernels.gated_delta_rule.extremes import VALID_EXTREMES
from workbench.kernels.requirements import dtype_name

MOE_LAYER = "moe_layer"
#: Ops that a dense model does not have, and those that take one token of each sequence.
EXPERT_OPS = (MOE_LAYER, "experts", "routing", "alignment")
IN_PLACE = "gdn_decode_in_place"
ONE_TOKEN = ("gdn_decode", IN_PLACE)
#: From so many tokens on the arbiter of the experts is a loop over the experts in float64, and no loop over the tokens.
LOOP_TOKENS = 64
#: Rows of an alignment come in blocks of so many where it is timed alone.
BLOCK = 64
#: Rows of the inputs that are hard: long enough for several chunks, and on a GPU for several parts of a sequence.
HARD_TOKENS = {"cuda": 1030, "cpu": 130}

_TOKENS = re.compile(r"(?:(?P<batch>\d+)x)?(?P<tokens>\d+)")

Drawn = dict[str, Any]


#: The ops of a case that is not one op by its own name.
_OPS = {
    MOE_LAYER: ("experts", "routing", "alignment"), "experts": ("experts", "alignment"), IN_PLACE: ("gdn_decode",),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Draw:
    """Random tensors on a device, the same for the same seed."""

    device: str
    generator: torch.Generator

    @classmethod
    def of(cls, device: str, seed: int) -> Draw:
        return cls(device, torch.Generator(device=device).manual_seed(seed))

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.device)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator, device=self.device)

    def unit(self, *shape: int) -> Tensor:
        return torch.nn.functional.normalize(self.normal(*shape), dim=-1)


class Words:
    """Who watches the results of an op and keeps nothing but the words that its kernels raise (`tracing.flags`)."""

    def __init__(self, device: str):
        self.device = device
        self.rows: dict[tuple[str, ...], Tensor] = {}

    def flag_rows(self, names: Sequence[str]) -> Tensor:
        """int32 [len(names), 2], -1 until a kernel raises them."""
        names = tuple(names)
        if names not in self.rows:
            self.rows[names] = torch.full((len(names), 2), -1, dtype=torch.int32, device=self.device)
        return self.rows[names]

    @property
    def are_raised(self) -> bool:
        return bool(self.rows) and all(bool((words >= 0).all()) for words in self.rows.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One op at one shape for `batch` sequences of `tokens` tokens. `name` is that of its rows in a result."""

    op: str
    shape: Shape
    batch: int
    tokens: int
    dtype: torch.dtype
    weights: Mapping[str, Tensor] = field(default_factory=dict, compare=False, repr=False)

    @property
    def name(self) -> str:
        return f"{self.op}, {self.shape.name}, {self.batch}x{self.tokens}, {dtype_name(self.dtype)}"

    @property
    def rows(self) -> int:
        return self.batch * self.tokens

    @property
    def contract(self) -> Contract:
        """That of the op whose output the case has."""
        return CONTRACTS[self.ops[0]]

    @property
    def ops(self) -> tuple[str, ...]:
        """The ops that a backend may be named for, the one that does the work first."""
        return _OPS.get(self.op, (self.op,))

    @property
    def written(self) -> tuple[str, ...]:
        """Inputs that every call of the case updates."""
        return ("window", "state") if self.op == IN_PLACE else ()

    def draw(self, device: str, seed: int) -> Drawn:
        """Arguments of a call, in the dtype of the case."""
        return self._cast(_DRAWN[self.op](self, Draw.of(device, seed)) | dict(self.weights), device)

    def with_weights(self, device: str, seed: int) -> Case:
        """The case with the weights that all its sets of inputs share: those of experts, which are the largest."""
        if "experts" not in self.ops:
            return self
        draw, s = Draw.of(device, seed), self.shape
        gate_up = draw.normal(s.experts, 2 * s.expert_width, s.hidden).mul_(s.hidden**-0.5).to(self.dtype)
        down = draw.normal(s.experts, s.hidden, s.expert_width).mul_(s.expert_width**-0.5).to(self.dtype)
        return replace(self, weights={"gate_up": gate_up, "down": down})

    def hard(self, device: str, seed: int) -> dict[str, Drawn]:
        """Inputs that are legal and kill wrong kernels, by name; for some ops fewer tokens than the case has."""
        found = _HARD[self.op](self, Draw.of(device, seed)) if self.op in _HARD else {}
        return {name: self._cast(given | dict(self.weights), device) for name, given in found.items()}

    def _cast(self, given: Drawn, device: str) -> Drawn:
        return self.contract.cast(given, torch.int64 if self.op == "alignment" else self.dtype, device)

    def call(self, kernels: Kernels, given: Drawn, watch: Words | None = None) -> tuple[Tensor, ...]:
        """The outputs of the contract, in its order; kernels that raise flags are given those of `watch`."""
        watched = {} if watch is None else {"watch": watch}
        if self.op == MOE_LAYER:
            weights, experts = kernels.routing(given["logits"], top_k=given["top_k"], normalise=True, **watched)
            x, gate_up, down = given["x"], given["gate_up"], given["down"]
            return (kernels.experts(x, weights.to(x.dtype), experts, gate_up, down, **watched),)
        if self.op == IN_PLACE:
            watched |= {"in_place": True}
        return self.contract.parts(getattr(kernels, self.ops[0])(**given, **watched))

    def expected(self, given: Drawn) -> tuple[Tensor, ...]:
        """The arbiter's outputs in float64 for the same rounded inputs."""
        wide = self.contract.cast(given, torch.float64, str(next(iter(_tensors(given))).device))
        requested = dict.fromkeys((op for op in self.ops if op != "alignment"), "reference")
        requested |= {"alignment": "reference"} if self.op == "alignment" else {}
        rows = wide["x"].shape[0] if "experts" in self.ops else 0
        if rows > LOOP_TOKENS:
            requested["experts"] = "torch_loop"
        with torch.inference_mode():
            return replace(self, op="gdn_decode" if self.op == IN_PLACE else self.op).call(Kernels(requested), wide)

    def cost(self, given: Drawn) -> tuple[float, float]:
        """(bytes that must be moved, flops of the products) of a call: operands read once, results written once."""
        return _COSTS[self.op](self, given, WIDTH[dtype_name(self.dtype)])


def _tensors(given: Drawn) -> list[Tensor]:
    return [value for value in given.values() if isinstance(value, Tensor)]


def parse_tokens(text: str) -> tuple[int, int]:
    """``8x4096`` is eight sequences of 4096 tokens, ``512`` one. Raises InputError for other text."""
    match = _TOKENS.fullmatch(text.strip())
    sizes = (int(match["batch"] or 1), int(match["tokens"])) if match else (0, 0)
    if min(sizes) < 1:
        raise InputError(f"tokens {text!r}: expected TOKENS or SEQUENCESxTOKENS of at least 1 each, such as 8x4096")
    return sizes


def fits(op: str, shape: Shape, tokens: tuple[int, int]) -> bool:
    """Whether a model of that shape calls the op with so many tokens: a dense one has no experts, a step of decoding
    one token."""
    return bool(shape.experts or op not in EXPERT_OPS) and (op not in ONE_TOKEN or tokens[1] == 1)


def case_of(op: str, shape: Shape, tokens: tuple[int, int], dtype: torch.dtype) -> Case:
    """Raises InputError for an op that is not timed, and for experts of a model that has none."""
    if op not in TIMED:
        raise InputError(f"op {op!r}: expected one that is timed: {', '.join(TIMED)}")
    case = Case(op=op, shape=shape, batch=tokens[0], tokens=tokens[1], dtype=dtype)
    if not shape.experts and op in EXPERT_OPS:
        raise InputError(f"op {op}: shape {shape.name} has no experts; name another shape")
    if op in ONE_TOKEN and case.tokens != 1:
        raise InputError(f"op {op}: expected one token of each sequence (64x1), found {case.tokens}")
    return case


# ---- inputs


def _delta_rule(case: Case, draw: Draw) -> Drawn:
    s, at = case.shape, (case.batch, case.tokens)
    given = {
        "q": draw.unit(*at, s.key_heads, s.key_dim).mul_(s.key_dim**-0.5),
        "k": draw.unit(*at, s.key_heads, s.key_dim),
        "v": draw.normal(*at, s.value_heads, s.value_dim),
        "log_decay": draw.uniform(*at, s.value_heads).mul_(-2.0),
        "beta": draw.uniform(*at, s.value_heads),
    }
    if case.tokens == 1:  # a step of decoding has a state, a prompt starts from none
        given["initial_state"] = draw.normal(case.batch, s.value_heads, s.key_dim, s.value_dim)
    return given


def _decode_step(case: Case, draw: Draw) -> Drawn:
    """Gates as models have them: rates of 1 to 16, most tokens forgetting little."""
    s, batch = case.shape, case.batch
    return {
        "qkv": draw.normal(batch, s.channels), "z": draw.normal(batch, s.value_heads, s.value_dim),
        "raw_beta": draw.normal(batch, s.value_heads), "raw_gate": 2.0 * draw.normal(batch, s.value_heads),
        "conv_weight": draw.normal(s.channels, s.conv_width).mul_(0.5),
        "A_log": (1.0 + 15.0 * draw.uniform(s.value_heads)).log(), "dt_bias": 2.0 * draw.normal(s.value_heads) - 3.0,
        "norm_weight": 1.0 + 0.1 * draw.normal(s.value_dim),
        "window": draw.normal(batch, s.conv_width - 1, s.channels),
        "state": draw.normal(batch, s.value_heads, s.key_dim, s.value_dim), "eps": 1e-6,
    }  # fmt: skip


def _conv(case: Case, draw: Draw) -> Drawn:
    s = case.shape
    return {
        "x": draw.normal(case.batch, case.tokens, s.channels),
        "weight": draw.normal(s.channels, s.conv_width).mul_(0.5),
        "window": draw.normal(case.batch, s.conv_width - 1, s.channels),
    }  # fmt: skip


def _rms_norm(case: Case, draw: Draw) -> Drawn:
    hidden = case.shape.hidden
    return {"x": draw.normal(case.batch, case.tokens, hidden), "weight": 0.3 * draw.normal(hidden), "eps": 1e-6}


def _gated_rms_norm(case: Case, draw: Draw) -> Drawn:
    shape = (case.batch, case.tokens, case.shape.value_heads, case.shape.value_dim)
    weight = 1.0 + 0.1 * draw.normal(case.shape.value_dim)
    return {"x": draw.normal(*shape), "gate": draw.normal(*shape), "weight": weight, "eps": 1e-6}


def _routing(case: Case, draw: Draw) -> Drawn:
    return {"logits": draw.normal(case.rows, case.shape.experts), "top_k": case.shape.top_k, "normalise": True}


def _chosen(case: Case, draw: Draw) -> Tensor:
    return draw.uniform(case.rows, case.shape.experts).topk(case.shape.top_k, dim=-1).indices


def _alignment(case: Case, draw: Draw) -> Drawn:
    return {"experts": _chosen(case, draw), "num_experts": case.shape.experts, "block": BLOCK}


def _experts(case: Case, draw: Draw) -> Drawn:
    weights = draw.uniform(case.rows, case.shape.top_k)
    return {
        "x": draw.normal(case.rows, case.shape.hidden), "weights": weights / weights.sum(-1, keepdim=True),
        "experts": _chosen(case, draw),
    }  # fmt: skip


def _moe_layer(case: Case, draw: Draw) -> Drawn:
    return {
        "x": draw.normal(case.rows, case.shape.hidden), "logits": draw.normal(case.rows, case.shape.experts),
        "top_k": case.shape.top_k,
    }  # fmt: skip


_DRAWN: dict[str, Callable[[Case, Draw], Drawn]] = {
    "gated_delta_rule": _delta_rule, "gdn_decode": _decode_step, IN_PLACE: _decode_step, "causal_conv": _conv,
    "gated_rms_norm": _gated_rms_norm, "rms_norm": _rms_norm, "routing": _routing, "alignment": _alignment,
    "experts": _experts, MOE_LAYER: _moe_layer,
}  # fmt: skip

#: What can be timed.
TIMED = tuple(op for op in _DRAWN if _OPS.get(op, (op,))[0] in CONTRACTS)


# ---- inputs that kill wrong kernels


def _in_shape(inputs: Mapping[str, Tensor], shape: Shape, draw: Draw) -> Drawn:
    """The same rule in the heads of `shape`: heads over and over, keys and values through orthonormal rows.

    Products of keys, and with them all that the input provokes, stay what they are.
    """

    def rows(count: int, size: int) -> Tensor:
        return torch.linalg.qr(draw.normal(size, min(count, size)).double())[0].T.float()

    given = {name: value.to(draw.device) for name, value in inputs.items()}
    key_heads, value_heads = given["k"].shape[2], given["v"].shape[2]
    group, theirs = shape.value_heads // shape.key_heads, value_heads // key_heads
    of_key = [head % key_heads for head in range(shape.key_heads)]
    of_value = [theirs * (head // group % key_heads) + head % group % theirs for head in range(shape.value_heads)]
    given |= {name: given[name][:, :, of_key] for name in ("q", "k")}
    given |= {name: given[name][:, :, of_value] for name in ("v", "log_decay", "beta")}
    if "initial_state" in given:
        given["initial_state"] = given["initial_state"][:, of_value]
    keys = rows(given["k"].shape[-1], shape.key_dim)
    values = rows(given["v"].shape[-1], shape.value_dim)
    given |= {"q": given["q"] @ keys, "k": given["k"] @ keys, "v": given["v"] @ values}
    if "initial_state" in given:
        given["initial_state"] = keys.T @ given["initial_state"] @ values
    return given


def _hard_rules(case: Case, draw: Draw) -> dict[str, Drawn]:
    s, tokens = case.shape, min(case.tokens, HARD_TOKENS[draw.device.split(":")[0]])
    fits = s.key_dim >= 16 and s.value_dim >= 24  # the head sizes that the inputs are made in
    found = {}
    for name, extreme in VALID_EXTREMES.items() if fits else ():
        made = extreme.make(tokens, int(draw.generator.initial_seed() % 1000))
        # Packed rows are another call than the one that is timed; so are several tokens for one.
        if "cu_seqlens" not in made and (tokens > 1) == (made["q"].shape[1] > 1):
            found[name] = _in_shape(made, s, draw)
    return found


def _hard_steps(case: Case, draw: Draw) -> dict[str, Drawn]:
    base = _decode_step(case, draw)
    return {
        "gates that forget": base | {"raw_gate": base["raw_gate"] + 30.0},
        "gates that keep": base | {"raw_gate": base["raw_gate"] - 40.0},
        "channels of zeros": base | {"qkv": torch.zeros_like(base["qkv"]), "window": torch.zeros_like(base["window"])},
        "a state of 1e6": base | {"state": 1e6 * base["state"]},
        "beta at its ends": base | {"raw_beta": 100.0 * base["raw_beta"].sign()},
    }


def _hard_choice(case: Case, draw: Draw) -> dict[str, Drawn]:
    """All tokens on one set of experts, the last ones: every other expert is empty."""
    s = case.shape
    one = torch.arange(s.experts - s.top_k, s.experts, device=draw.device).expand(case.rows, -1).clone()
    name = "all tokens on one set of experts"
    if case.op == "alignment":
        return {name: {"experts": one, "num_experts": s.experts, "block": BLOCK}}
    if case.op == "experts":
        return {name: _experts(case, draw) | {"experts": one}}
    logits = torch.full((case.rows, s.experts), -4.0, device=draw.device)
    logits[:, -s.top_k :] = torch.arange(s.top_k, device=draw.device) / 8.0
    return {name: _moe_layer(case, draw) | {"logits": logits}}


def _hard_logits(case: Case, draw: Draw) -> dict[str, Drawn]:
    shape = (case.rows, case.shape.experts)
    tied = torch.randint(0, 3, shape, generator=draw.generator, device=draw.device).float()
    rest = {"top_k": case.shape.top_k, "normalise": True}
    return {
        "ties": {"logits": tied, **rest}, "all equal": {"logits": torch.zeros(shape, device=draw.device), **rest},
        "far from zero": {"logits": 1000.0 + 8.0 * draw.normal(*shape).round(), **rest},
    }  # fmt: skip


def _hard_scales(case: Case, draw: Draw) -> dict[str, Drawn]:
    given = _DRAWN[case.op](case, draw)
    return {f"x times {scale:g}": given | {"x": given["x"] * scale} for scale in (1e-4, 1e3, 0.0)}


_HARD: dict[str, Callable[[Case, Draw], dict[str, Drawn]]] = {
    "gated_delta_rule": _hard_rules, "gdn_decode": _hard_steps, IN_PLACE: _hard_steps, "causal_conv": _hard_scales,
    "gated_rms_norm": _hard_scales, "rms_norm": _hard_scales, "routing": _hard_logits, "alignment": _hard_choice,
    "experts": _hard_choice, MOE_LAYER: _hard_choice,
}  # fmt: skip


# ---- least costs


def _rule_cost(case: Case, given: Drawn, width: int) -> tuple[float, float]:
    s, rows = case.shape, case.rows
    vectors = rows * (2 * s.key_heads * s.key_dim + 2 * s.value_heads * s.value_dim + s.value_heads) * width
    gates = rows * s.value_heads * 4
    state = case.batch * s.value_heads * s.key_dim * s.value_dim * 4 * (2 if "initial_state" in given else 1)
    flops = case.batch * s.value_heads * delta_rule_flops(case.tokens, s.key_dim, s.value_dim, 64)
    return float(vectors + gates + state), flops


def _step_cost(case: Case, given: Drawn, width: int) -> tuple[float, float]:
    """State and window are read and written once, everything else is read once; the output is as large as z."""
    moved = sum(x.numel() * x.element_size() for x in _tensors(given))
    again = [given["state"], given["window"], given["z"]]
    flops = case.batch * case.shape.value_heads * delta_rule_flops(1, case.shape.key_dim, case.shape.value_dim, 64)
    return float(moved + sum(x.numel() * x.element_size() for x in again)), flops


def _elementwise_cost(tensors: float) -> Callable[[Case, Drawn, int], tuple[float, float]]:
    """`tensors` of the size of x are read and written."""

    def cost(case: Case, given: Drawn, width: int) -> tuple[float, float]:
        extra = sum(x.numel() for name, x in given.items() if name in ("weight", "window"))
        return (tensors * given["x"].numel() + extra) * width, 0.0

    return cost


def _routing_cost(case: Case, given: Drawn, width: int) -> tuple[float, float]:
    return case.rows * (case.shape.experts * width + case.shape.top_k * (width + 8.0)), 0.0


def _alignment_cost(case: Case, given: Drawn, width: int) -> tuple[float, float]:
    return 8.0 * (3 * case.rows * case.shape.top_k + case.shape.experts), 0.0


def _experts_cost(case: Case, given: Drawn, width: int) -> tuple[float, float]:
    """The weights of the experts that are hit are read once; tokens are read and written once."""
    s = case.shape
    chosen = given["experts"] if "experts" in given else given["logits"].topk(s.top_k, dim=-1).indices
    expert = 3.0 * s.hidden * s.expert_width
    moved = (int(chosen.unique().numel()) * expert + 2.0 * case.rows * s.hidden) * width
    moved += _routing_cost(case, given, width)[0] if case.op == MOE_LAYER else 0.0
    return moved, 2.0 * case.rows * s.top_k * expert


_COSTS: dict[str, Callable[[Case, Drawn, int], tuple[float, float]]] = {
    "gated_delta_rule": _rule_cost, "gdn_decode": _step_cost, IN_PLACE: _step_cost,
    "causal_conv": _elementwise_cost(2.0), "gated_rms_norm": _elementwise_cost(3.0), "rms_norm": _elementwise_cost(2.0),
    "routing": _routing_cost, "alignment": _alignment_cost, "experts": _experts_cost, MOE_LAYER: _experts_cost,
}  # fmt: skip
