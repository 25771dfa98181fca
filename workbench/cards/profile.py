"""What a profile says of a card. Every figure has a source; one that nobody states is `unknown`, with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

#: dtypes that a profile may name.
DTYPES = ("float16", "bfloat16", "float32", "float64")

#: What a rule may say of a call.
OUTCOMES = ("run", "route", "cast")

#: Op of the rules for all products that torch is asked for.
MATMUL = "matmul"

#: What a rule may be for: the ops of the workbench besides.
OPS = (
    MATMUL, "alignment", "attention", "causal_conv", "experts", "gated_delta_rule", "gated_rms_norm", "gdn_decode",
    "linear", "rms_norm", "routing",
)  # fmt: skip

#: Figures that a profile states or declares unknown.
FIGURES = ("memory_bytes", "bandwidth", *(f"rates.{name}" for name in DTYPES))


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """What becomes of the calls of one op in one library, by dtype.

    op       an op of the workbench (``linear``), or ``matmul`` for every matrix product that torch is asked for
    library  who is asked first: a backend of that op, or a library
    dtypes   of the call
    outcome  ``run``; ``route``: another library computes it, in the same dtype; ``cast``: the inputs are rounded to
             another dtype first
    to       library of a route, dtype of a cast, None of a run
    why      what is known of it
    price    time of the call divided by that of the card's best dtype, where somebody measured it; None: from the rates
    source   who says so
    """

    op: str
    library: str
    dtypes: tuple[str, ...]
    outcome: str
    to: str | None = None
    why: str
    price: float | None = None
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AbsentPrimitive:
    """An operator of torch (``aten::...``) that raises on the card: the library missing, its error, what to use."""

    name: str
    library: str
    error: str
    instead: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """One card.

    name, title        for `--card` and for people
    device             torch's name of the kind of device: cuda or cpu
    capability         CUDA compute capability; None: no CUDA device, or unknown
    memory_bytes       memory of the card, bytes; None: unknown
    bandwidth          of that memory, bytes/s; None: unknown
    rates              dtype -> matrix products with fp32 accumulation or better, flop/s without sparsity
    measured_bandwidth, measured_rates
                       the same as a benchmark found them: what can be had of the figures above
    native_matmul      dtypes whose products the card has arithmetic for
    model_dtype        what a checkpoint is loaded in there
    absent_modules     Python module -> why it is not there
    absent_primitives  operator of torch -> what is missing
    rules              in order: the first that names op, library and dtype holds
    notes              what else is known
    sources            figure -> who states it
    unknown            figure -> why it is not known
    """

    name: str
    title: str
    device: str
    model_dtype: str
    native_matmul: tuple[str, ...]
    capability: tuple[int, int] | None = None
    memory_bytes: int | None = None
    bandwidth: float | None = None
    rates: Mapping[str, float] = field(default_factory=dict)
    measured_bandwidth: float | None = None
    measured_rates: Mapping[str, float] = field(default_factory=dict)
    absent_modules: Mapping[str, str] = field(default_factory=dict)
    absent_primitives: Mapping[str, AbsentPrimitive] = field(default_factory=dict)
    rules: tuple[Rule, ...] = ()
    notes: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)

    def rule(self, op: str, dtype: str, library: str | None = None) -> Rule | None:
        """The first rule for calls of `op` in `dtype`, of `library` if one is named; None where there is none."""
        named = (r for r in self.rules if r.op == op and dtype in r.dtypes and library in (None, r.library))
        return next(named, None)

    def best_dtype(self) -> str | None:
        """The dtype of the highest rate; None where no rate is known."""
        return max(self.rates, key=self.rates.__getitem__, default=None)

    def slowdown(self, dtype: str, rule: Rule | None = None) -> tuple[float | None, str]:
        """(time of a product in `dtype` / time in the card's model dtype, how that is known); None: unknown.

        A lower bound where it is derived: both rates are peaks, and memory traffic, which grows with the width of the
        dtype, is not in it.
        """
        if rule is not None and rule.price is not None:
            return rule.price, rule.source
        missing = [name for name in (self.model_dtype, dtype) if name not in self.rates]
        if missing:
            reasons = {f"rates.{name}": self.unknown.get(f"rates.{name}", "not stated") for name in missing}
            return None, "; ".join(f"{figure}: {reason}" for figure, reason in reasons.items())
        ratio = self.rates[self.model_dtype] / self.rates[dtype]
        return ratio, f"peak rates: {self.rates[self.model_dtype]:.3g} / {self.rates[dtype]:.3g} flop/s"
