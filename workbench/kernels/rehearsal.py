"""A card's limits, held while a model runs here: what raises there raises, what is routed is counted, products round.

`Rehearsal(card)` is a context. Inside it, every operator that reaches torch's dispatcher is looked at:

    absent     operators that the card lacks (`Card.absent_primitives`) raise AbsentPrimitive instead of running
    products   matrix products, convolutions and attention follow the card's rules for ``matmul``: they run, are routed
               to another library (which changes no value: counted, priced by the card's rates), or have their operands
               cast (named, counted, with the numbers that overflow or flush). A dtype that the card has no arithmetic
               for and no rule is a DtypeViolation
    rounding   products of 16-bit operands are computed as the card does it: exact products of the operands, summed in
               float32, rounded once to the dtype of the result
    composite  operators made of others are taken apart first, also in inference mode, so that nothing hides in them;
               of operators of other libraries, and of those of torch that call others inside, the inside is watched

Nothing here casts a float32 or float64 tensor inside the gated delta rule: its state, its log decays and their sum are
raised to powers, and a rule of a card that would narrow them is a DtypeViolation that names the cast to insert.

Elementwise operators need nothing: torch computes those of 16-bit tensors in float32 and rounds once, on a CPU as on a
GPU. Sums in float32 may be taken in another order than on the card.

What torch does not dispatch is not seen: another thread, and code of a library that is no operator of torch.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from workbench.cards import Card, Rule
from workbench.errors import BackendError

#: Op of the rules for products that torch is asked for.
MATMUL = "matmul"

#: Matrix products: operator -> position of the left factor, whose last axis is summed over.
PRODUCTS = {
    "aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1, "aten::addbmm": 1, "aten::mv": 0,
    "aten::addmv": 1, "aten::dot": 0, "aten::vdot": 0, "aten::_grouped_mm": 0, "mkldnn::_linear_pointwise": 0,
    "aten::_addmm_activation": 1, "aten::_scaled_mm": 0, "aten::_scaled_grouped_mm": 0,
}  # fmt: skip
CONVOLUTIONS = frozenset({"aten::convolution", "aten::_convolution", "aten::mkldnn_convolution"})
#: Operators that are the whole attention, with its two products inside.
ATTENTION = frozenset({
    "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention",
})  # fmt: skip

#: Operators made of others that only move, view or convert: taking them apart costs time and shows nothing.
LAYOUTS = frozenset({
    "aten::to", "aten::type_as", "aten::reshape", "aten::reshape_as", "aten::view_as", "aten::expand_as",
    "aten::flatten", "aten::unflatten", "aten::contiguous", "aten::chunk", "aten::narrow", "aten::movedim",
    "aten::numpy_T", "aten::mT", "aten::ravel", "aten::pad", "aten::stack", "aten::item", "aten::detach",
})  # fmt: skip

#: Operators of torch that call others from C++, below where a mode sees them: their inside is watched.
CONTAINERS = frozenset({
    "aten::linalg_lu", "aten::linalg_matrix_exp", "aten::_trilinear", "aten::_euclidean_dist",
    "aten::_native_multi_head_attention", "aten::_transformer_encoder_layer_fwd",
})  # fmt: skip

#: Ops of the workbench inside which nothing of float32 or wider is narrowed by a rule.
KEPT_WIDE = frozenset({"gated_delta_rule"})

_KERNELS = Path(__file__).resolve().parent
_PACKAGE = _KERNELS.parent


class AbsentPrimitive(BackendError):
    """An operator was called that the rehearsed card does not have."""


class DtypeViolation(BackendError):
    """An operator was called in a dtype that the rehearsed card cannot take there, or must not be given."""


@dataclass(slots=True)
class Seen:
    """All products of one kind: who asked, what became of them.

    op          op of the workbench whose file called, ``model`` for the model itself, ``other`` outside of both
    site        file of the package that called first, with the line
    primitive   operator of torch
    dtype       of the operands as they came
    outcome     ``run``, ``route`` or ``cast``, by `rule` of the card; None where the card has no rule and runs it
    library, to who was asked first, and where it went
    calls, flops
    overflowed  results that were finite in float32 and are not in the dtype of the result
    flushed     results that were not zero in float32 and are
    cast_overflowed, cast_flushed
                the same of operands that a rule cast
    """

    op: str
    site: str
    primitive: str
    dtype: str
    outcome: str
    library: str
    to: str | None
    rule: Rule | None
    calls: int = 0
    flops: int = 0
    overflowed: int = 0
    flushed: int = 0
    cast_overflowed: int = 0
    cast_flushed: int = 0


class Rehearsal(TorchDispatchMode):
    """The limits of `card` for every operator inside the context. May be entered again while it is active."""

    def __init__(self, card: Card):
        super().__init__()
        self.card = card
        self.operators = 0
        self._seen: dict[tuple, Seen] = {}
        self._kinds: dict[torch._ops.OpOverload, str] = {}
        self._entered: list[bool] = []

    def __enter__(self) -> Rehearsal:
        is_new = not any(mode is self for mode in _get_current_dispatch_mode_stack())
        self._entered.append(is_new)
        if is_new:
            super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._entered.pop():
            super().__exit__(*error)

    @property
    def seen(self) -> list[Seen]:
        """What was seen so far, a row for each caller's op, operator, dtype and outcome."""
        return sorted(self._seen.values(), key=lambda s: (s.op, s.primitive, s.dtype, s.outcome))

    def forget(self) -> None:
        """Start counting again."""
        self._seen.clear()
        self.operators = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = self._kind(func)
        self.operators += 1
        if kind == "plain":
            return func(*args, **kwargs)
        if kind == "composite":
            self.operators -= 1  # its parts are counted
            with self:
                return func.decompose(*args, **kwargs)
        if kind == "absent":
            raise self._absence(func)
        if kind == "container":
            return self._opened(func, args, kwargs)
        return self._product(func, kind, args, kwargs)

    def _kind(self, func: torch._ops.OpOverload) -> str:
        name = func._schema.name
        if _functional(name) in self.card.absent_primitives:
            return "absent"
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            return "plain" if name in LAYOUTS else "composite"
        if _functional(name) in PRODUCTS:
            return "product"
        if name in CONTAINERS or not name.startswith(("aten::", "prim::", "prims::")):
            return "container"
        return "convolution" if name in CONVOLUTIONS else "attention" if name in ATTENTION else "plain"

    def _opened(self, func: torch._ops.OpOverload, args: tuple, kwargs: dict):
        """The operator by the kernel of its tensors' device, called below this mode, with the mode on again inside."""
        tensors = (x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.layout == torch.strided)
        device = next((x.device.type for x in tensors), "")
        key = {"cpu": DispatchKey.CPU, "cuda": DispatchKey.CUDA}.get(device)
        if key is None or not torch._C._dispatch_has_computed_kernel_for_dispatch_key(func.name(), key.name):
            return func(*args, **kwargs)
        with self:
            return func.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)

    def _absence(self, func: torch._ops.OpOverload) -> AbsentPrimitive:
        lacking = self.card.absent_primitives[_functional(func._schema.name)]
        op, site = _caller()
        return AbsentPrimitive(
            f"{lacking.name}, called by {op} at {site}: card {self.card.name} lacks {lacking.library}: "
            f"{lacking.error}; use {lacking.instead}"
        )

    def _product(self, func: torch._ops.OpOverload, kind: str, args: tuple, kwargs: dict):
        name = _functional(func._schema.name)
        factors = _factors(name, kind, args)
        if not factors or factors[0].is_meta or not factors[0].dtype.is_floating_point:
            return func(*args, **kwargs)
        dtype = factors[0].dtype
        text = str(dtype).removeprefix("torch.")
        rule = self.card.rule(MATMUL, text)
        op, site = _caller()
        if rule is None and text not in self.card.native_matmul:
            raise self._violation(
                func, args, dtype, op, site, f"card {self.card.name} has no arithmetic for it and its profile no rule",
                f"cast it to {self.card.model_dtype} before the call, or add a rule that routes {MATMUL} in {text}",
            )  # fmt: skip
        outcome = "run" if rule is None else rule.outcome
        if outcome == "cast":
            self._check_cast(func, args, dtype, op, site, rule)  # before it is counted: it is not done
        library = "torch" if rule is None else rule.library
        key = (op, name, dtype, outcome)
        seen = self._seen.get(key)
        if seen is None:
            to = None if rule is None else rule.to
            seen = self._seen[key] = Seen(op, site, name, text, outcome, library, to, rule)
        seen.calls += 1
        seen.flops += _flops(name, kind, factors, args)
        if outcome == "cast":
            return self._cast(func, kind, args, kwargs, dtype, getattr(torch, rule.to), seen)
        if kind == "attention" or dtype.itemsize > 2:
            return func(*args, **kwargs)
        return self._rounded(func, args, kwargs, dtype, seen)

    def _check_cast(self, func, args: tuple, wide: torch.dtype, op: str, site: str, rule: Rule) -> None:
        """Nothing that has to stay wide is narrowed."""
        if op in KEPT_WIDE and wide.itemsize > 2 and getattr(torch, rule.to).itemsize <= 2:
            text = str(wide).removeprefix("torch.")
            raise self._violation(
                func, args, wide, op, site,
                f"card {self.card.name} would cast it to {rule.to} ({rule.why}), and nothing narrows the state, "
                "the log decays or their sum",
                f"route it to a library that takes {text}, or cast in {site} the operands that may be narrow",
            )  # fmt: skip

    def _cast(self, func, kind, args, kwargs, wide, narrow, seen: Seen):
        """The call with its operands in `narrow`, its result back in `wide`."""

        def narrowed(x: object) -> object:
            if not isinstance(x, Tensor) or x.dtype != wide:
                return x
            rounded = x.to(narrow)
            over, flushed = _lost(x, rounded)
            seen.cast_overflowed += over
            seen.cast_flushed += flushed
            return rounded

        given = tuple(map(narrowed, args))
        function, into = _without_writing(func, args, kwargs)
        named = {key: narrowed(x) for key, x in kwargs.items() if key != "out"}
        if kind == "attention" or narrow.itemsize > 2:
            result = function(*given, **named)
        else:
            result = self._rounded(function, given, named, narrow, seen)
        if into is not None:
            return into.copy_(result)
        if isinstance(result, tuple):
            return tuple(x.to(wide) if isinstance(x, Tensor) and x.dtype == narrow else x for x in result)
        return result.to(wide)

    def _rounded(self, func, args, kwargs, dtype: torch.dtype, seen: Seen):
        """The product of 16-bit operands summed in float32 and rounded once."""
        function, into = _without_writing(func, args, kwargs)
        asked = kwargs.get("out_dtype") or next((x for x in args if isinstance(x, torch.dtype)), None)
        if asked is not None:  # 16-bit operands, a wider result: nothing is rounded here
            return func(*args, **kwargs)
        widened = tuple(_widened(x, dtype) for x in args)
        named = {key: _widened(x, dtype) for key, x in kwargs.items() if key != "out"}
        wide = function(*widened, **named)
        result = wide.to(dtype)
        over, flushed = _lost(wide, result)
        seen.overflowed += over
        seen.flushed += flushed
        return result if into is None else into.copy_(result)

    def _violation(
        self, func, args: tuple, dtype: torch.dtype, op: str, site: str, reason: str, remedy: str
    ) -> DtypeViolation:
        arguments = func._schema.arguments
        named = [(arguments[i].name, x) for i, x in enumerate(args) if isinstance(x, Tensor) and x.dtype == dtype]
        tensors = ", ".join(f"{_name_of(x) or name} {list(x.shape)}" for name, x in named)
        text = str(dtype).removeprefix("torch.")
        return DtypeViolation(f"{func._schema.name} of {op} at {site}: {tensors} in {text}: {reason}; {remedy}")


def _functional(name: str) -> str:
    """``aten::addmm_`` is ``aten::addmm`` that writes into its first argument."""
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def _without_writing(func, args: tuple, kwargs: dict):
    """(the operator that returns a new tensor, where the result is to be written or None)."""
    name, overload = func._schema.name, func._schema.overload_name
    if name != _functional(name):
        packet = getattr(torch.ops.aten, _functional(name).removeprefix("aten::"))
        return packet.default, args[0]
    if "out" in kwargs:
        packet = func.overloadpacket
        base = overload.removesuffix("out").removesuffix("_") or "default"
        return getattr(packet, base), kwargs["out"]
    return func, None


def _widened(x: object, dtype: torch.dtype) -> object:
    return x.float() if isinstance(x, Tensor) and x.dtype == dtype else x


def _lost(wide: Tensor, narrow: Tensor) -> tuple[int, int]:
    """Of the values of `wide`: (finite, but not in `narrow`; not zero, but zero in `narrow`)."""
    if not narrow.numel():
        return 0, 0
    gone = wide.isfinite() & ~narrow.isfinite()
    flushed = (narrow == 0) & (wide != 0)
    return int(gone.sum()), int(flushed.sum())


def _factors(name: str, kind: str, args: tuple) -> list[Tensor]:
    """The operands that are multiplied, the left one first."""
    start = PRODUCTS[name] if kind == "product" else 0
    return [x for x in args[start : start + (3 if kind == "attention" else 2)] if isinstance(x, Tensor)]


def _flops(name: str, kind: str, factors: list[Tensor], args: tuple) -> int:
    """Multiplications and additions, 2 for each pair that is summed; attention without regard to a causal mask."""
    left, right = factors[0], factors[1]
    if kind == "attention":
        keys, width = factors[1].shape[-2], factors[2].shape[-1] if len(factors) > 2 else left.shape[-1]
        return 2 * left[..., 0].numel() * keys * (left.shape[-1] + width)
    if kind == "convolution":
        # Each weight meets each place of the output once per batch row: places = tokens + padding - width + 1.
        padding, dilation, stride = args[4], args[5], args[3]
        places = left.shape[0]
        for i, size in enumerate(left.shape[2:]):
            reach = dilation[i] * (right.shape[2 + i] - 1) + 1
            places *= (size + 2 * padding[i] - reach) // stride[i] + 1
        return 2 * right.numel() * places
    if name in ("aten::dot", "aten::vdot", "aten::mv", "aten::addmv"):
        return 2 * left.numel()
    if name == "mkldnn::_linear_pointwise":  # the weight is [N, D]
        return 2 * left.numel() * right.shape[0]
    return 2 * left.numel() * right.shape[-1]


@functools.lru_cache(maxsize=4096)
def _place(code: CodeType) -> tuple[str, str] | None:
    """(op, file) of code of the package, None for any other and for this file."""
    path = Path(code.co_filename)
    if not path.is_relative_to(_PACKAGE) or path == Path(__file__).resolve() or path.parent == _KERNELS:
        return None
    file = path.relative_to(_PACKAGE).as_posix()
    if path.is_relative_to(_KERNELS):
        return path.relative_to(_KERNELS).parts[0], file
    return "model" if file == "model.py" else "other", file


def _caller() -> tuple[str, str]:
    """(op, file:line): the nearest code of the package that led to this operator, and the op that was asked for.

    An op may compute with the code of another (attention with the products of `linear`): the outermost one counts.
    """
    op, site = None, None
    frame = sys._getframe(2)
    while frame is not None:
        place = _place(frame.f_code)
        if place is not None:
            site = site or f"{place[1]}:{frame.f_lineno}"
            if op is None or place[0] not in ("model", "other"):
                op = place[0]
            elif place[0] == "model":
                break
        frame = frame.f_back
    return op or "other", site or "outside of the package"


def _name_of(tensor: Tensor) -> str | None:
    """What the code that called calls a tensor: a parameter of the model that runs, else a variable; None: neither."""
    frame, variable, module = sys._getframe(1), None, None
    while frame is not None:
        if _place(frame.f_code) is not None:
            here = dict(frame.f_locals)
            known = (name for name, x in here.items() if isinstance(x, Tensor) and x.data_ptr() == tensor.data_ptr())
            variable = variable or next(known, None)
            owner = here.get("self")
            module = owner if isinstance(owner, torch.nn.Module) else module  # the outermost one in the end
        frame = frame.f_back
    parameters = () if module is None else module.named_parameters()
    return next((name for name, x in parameters if x.data_ptr() == tensor.data_ptr()), variable)


def prices(card: Card, seen: Iterable[Seen]) -> list[Mapping[str, object]]:
    """For each row of `seen`: the time its products take at the card's peak, and beside it in the card's model dtype.

    ``seconds`` and ``seconds_in_model_dtype`` are flops / rate, None where the rate is unknown; ``factor`` is how many
    times longer it takes (by the rule's own price where it has one), ``how`` says what that is known from.
    """
    rows = []
    for row in seen:
        dtype = row.to if row.outcome == "cast" else row.dtype
        factor, how = card.slowdown(dtype, row.rule)
        best = card.rates.get(card.model_dtype)
        seconds = None if best is None else row.flops / best
        rows.append({
            "op": row.op, "primitive": row.primitive, "dtype": row.dtype, "outcome": row.outcome, "flops": row.flops,
            "seconds": None if seconds is None or factor is None else seconds * factor,
            "seconds_in_model_dtype": seconds, "factor": factor, "how": how,
        })  # fmt: skip
    return rows
