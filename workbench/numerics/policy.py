"""The policy that picks how a gated delta rule is evaluated. Data only.

A backend that cannot honour a policy refuses it with the reason; none ignores one.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from dataclasses import dataclass
from typing import Any

from workbench.errors import PolicyError

EXPONENT_FORMS = {
    "difference_then_mask": "exp of (G_i - G_j) with -inf above the diagonal: no argument is positive",
    "mask_after": "exp of every G_i - G_j, upper triangle set to zero afterwards: gradients become NaN past the limit",
    "multiply_mask": "exp of every G_i - G_j times a 0/1 mask: inf * 0 = NaN past the limit",
    "factored": "exp(G_i) * exp(-G_j) times a 0/1 mask: past the limit the second factor is inf, the whole chunk NaN",
    "factored_mask_after": "exp(G_i) * exp(-G_j), upper triangle zero: at the limit one row is bad, past it the chunk",
    "midpoint": "exp(G_i - m) * exp(m - G_j), m half-way between the ends, upper triangle zero: twice factored's span",
}
CUMSUM_KINDS = {
    "float64": "cumulative sum and its differences in float64, rounded to float32 before exp",
    "float32": "cumulative sum and its differences in float32: cancels when strong and weak gates share a chunk",
    "segsum": "every window summed by itself in float32: no cancellation, C times the additions",
    "bfloat16": "cumulative sum held, and exp taken, in bfloat16: near 128 nats its steps are 1 nat wide",
    "float16": "cumulative sum held, and exp taken, in float16: exp overflows past 11.09 nats",
}
SOLVERS = {
    "auto": "the first of block_substitution, solve_triangular and row_loop that solves a small system on the device",
    "block_substitution": "8-row blocks by substitution, merged to 32-row inverses, then block by block",
    "solve_triangular": "torch.linalg.solve_triangular on the unit lower triangular system",
    "row_loop": "forward substitution one row at a time: needs no solver library",
    "ungated_inverse": "D o (I + ungated kkt)^-1, the decay taken out of the inverse: the same in exact arithmetic",
    "doubling": "(I - kkt)(I + kkt^2)(I + kkt^4)...: powers of kkt reach 1e15 on repeated keys and cancel to nothing",
}

#: The solvers that lose nothing on valid inputs.
ACCURATE_SOLVERS = tuple(name for name in SOLVERS if name != "doubling")

#: Where a clamp can act. `cumsum` is G itself, before any exponential; `k_decay`, `inter_attention` and `state_update`
#: are the single exponents that are made of it.
CLAMP_SITES = {
    "A_log": "A_log, before exp in -exp(A_log) softplus(a + dt_bias)",
    "raw_gate": "log decay g of each token, before it is summed or taken exp of",
    "cumsum": "cumulative log decay G of a chunk",
    "k_decay": "exponent G in w = inverse (beta e^G k)",
    "inter_attention": "exponent G in (q e^G) S, the readout of the state that entered the chunk",
    "state_update": "exponents G_C and G_C - G of the update of the state",
    "solve_rows": "each row of the solve as soon as it is known: row_loop alone has such a moment",
    "state": "recurrent state after each update, of a chunk or of a token",
    "decode_gate": "log decay g of the one token of a decode step",
}
#: Sites that only the chunked form has, and the one that only a decode step has.
CHUNK_SITES = ("cumsum", "k_decay", "inter_attention", "state_update", "solve_rows")
DECODE_SITES = ("decode_gate",)
#: Sites whose values are never above 0: limits that leave no such value would turn a decay into a growth.
DECAY_SITES = ("raw_gate", "decode_gate", "cumsum", "k_decay", "inter_attention", "state_update")
#: A decode step is a call of one token, prefill any other.
PHASES = ("prefill", "decode", "both")


def shown(value: Any) -> str:
    """`value` for a message: short, and without the digits of a number that has hundreds of them."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a whole number of {value.bit_length()} bits"
    return f"{value!r:.80}"


def whole(value: Any) -> Any:
    """A whole number of any library as an int; everything else as it is."""
    return int(value) if isinstance(value, numbers.Integral) and not isinstance(value, bool) else value


def _finite(value: Any, field: str) -> float:
    """A real number of any library as a float. Raises PolicyError where there is no finite one."""
    found = math.nan
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        try:
            found = float(value)
        except OverflowError:
            raise PolicyError(
                f"policy field {field}: expected a finite number that float64 holds, found {shown(value)}"
            ) from None
    if not math.isfinite(found):
        raise PolicyError(f"policy field {field}: expected a finite number, found {shown(value)}")
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Clamp:
    """Values at `site` (see `CLAMP_SITES`) limited to [`lo`, `hi`] in one phase or `both`. NaN passes a clamp.

    The limits are kept as floats; one beyond the range of the clamped tensor's dtype is the end of that range. Raises
    PolicyError for an unknown site or phase, for limits that are no finite numbers or in the wrong order, and at
    `DECAY_SITES` for a `lo` above 0.
    """

    site: str
    phase: str = "both"
    lo: float
    hi: float

    def __post_init__(self) -> None:
        for field, known in (("site", CLAMP_SITES), ("phase", PHASES)):
            value = getattr(self, field)
            if not isinstance(value, str) or value not in known:
                raise PolicyError(
                    f"policy field clamps.{field}: expected one of {', '.join(known)}, found {shown(value)}"
                )
        for field in ("lo", "hi"):
            object.__setattr__(self, field, _finite(getattr(self, field), f"clamps.{field}"))
        if self.lo > self.hi:
            raise PolicyError(
                f"policy field clamps at {self.site}: expected lo <= hi, found {self.lo:g} and {self.hi:g}"
            )
        if self.site in DECAY_SITES and self.lo > 0:
            raise PolicyError(
                f"policy field clamps at {self.site}: expected lo <= 0, since what it limits is never above 0, found "
                f"{self.lo:g}; a log decay above 0 would grow the state"
            )
        for sites, phase in ((CHUNK_SITES, "prefill"), (DECODE_SITES, "decode")):
            if self.site in sites and self.phase != phase:
                raise PolicyError(
                    f"policy field clamps at {self.site}: expected phase {phase!r}, the only one that has this site, "
                    f"found {self.phase!r}"
                )

    def to_json(self) -> dict[str, object]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    @classmethod
    def from_json(cls, fields: object, source: str = "policy") -> Clamp:
        if not isinstance(fields, dict):
            raise PolicyError(f"{source}: field clamps: expected objects, found {type(fields).__name__}")
        known = [f.name for f in dataclasses.fields(cls)]
        unknown = sorted(set(fields) - set(known))
        missing = [name for name in ("site", "lo", "hi") if name not in fields]
        if unknown or missing:
            found = f"unknown {unknown[0]!r}" if unknown else f"no {missing[0]!r}"
            raise PolicyError(f"{source}: field clamps: expected {', '.join(known)} in each, found {found}")
        return cls(**fields)


@dataclass(frozen=True, kw_only=True, slots=True)
class NumericsPolicy:
    """Form of evaluation of the chunked gated delta rule.

    Fields: `exponent` (see `EXPONENT_FORMS`), `cumsum` (see `CUMSUM_KINDS`), `state_dtype` of the recurrent state,
    `solver` (see `SOLVERS`), `chunk` rows per chunk, `clamps` (see `Clamp`; one for each site and phase), and
    `nan_to_num`: zero for every NaN, the largest number for every infinity in output and state, as was done in the
    field. The default needs none of them: each exponent is a sum of non-positive terms, so every factor lies in [0, 1]
    in any format. Raises PolicyError for an unknown value and for values that cannot go together.
    """

    exponent: str = "difference_then_mask"
    cumsum: str = "float64"
    state_dtype: str = "float32"
    solver: str = "block_substitution"
    chunk: int = 64
    clamps: tuple[Clamp, ...] = ()
    nan_to_num: bool = False

    def __post_init__(self) -> None:
        for field, known in (("exponent", EXPONENT_FORMS), ("cumsum", CUMSUM_KINDS), ("solver", SOLVERS)):
            value = getattr(self, field)
            if not isinstance(value, str) or value not in known:
                raise PolicyError(f"policy field {field}: expected one of {', '.join(known)}, found {shown(value)}")
        if not isinstance(self.state_dtype, str) or self.state_dtype not in ("float32", "float64"):
            raise PolicyError(
                f"policy field state_dtype: expected float32 or float64, found {shown(self.state_dtype)}; "
                "a narrower recurrent state drifts with length"
            )
        chunk = whole(self.chunk)
        if type(chunk) is not int or not 1 <= chunk <= 1024:
            raise PolicyError(f"policy field chunk: expected a whole number from 1 to 1024, found {shown(self.chunk)}")
        object.__setattr__(self, "chunk", chunk)
        if not isinstance(self.nan_to_num, bool):
            raise PolicyError(f"policy field nan_to_num: expected true or false, found {shown(self.nan_to_num)}")
        if not isinstance(self.clamps, tuple) or not all(isinstance(clamp, Clamp) for clamp in self.clamps):
            raise PolicyError(f"policy field clamps: expected a tuple of Clamp, found {shown(self.clamps)}")
        seen: set[tuple[str, str]] = set()
        for clamp in self.clamps:
            for phase in PHASES[:2] if clamp.phase == "both" else (clamp.phase,):
                if (clamp.site, phase) in seen:
                    raise PolicyError(
                        f"policy field clamps: expected one clamp at {clamp.site} in {phase}, found two; keep one"
                    )
                seen.add((clamp.site, phase))
        if self.clamp("cumsum", "prefill") is not None and self.cumsum == "segsum":
            raise PolicyError(
                "policy field clamps at cumsum: expected a cumulative sum to clamp, found cumsum segsum, which sums "
                "every window by itself"
            )
        if self.clamp("solve_rows", "prefill") is not None and self.solver != "row_loop":
            raise PolicyError(
                "policy field clamps at solve_rows: expected solver row_loop, the only one that knows row after row, "
                f"found {self.solver}"
            )

    def clamp(self, site: str, phase: str) -> Clamp | None:
        """The clamp at `site` in `phase` (prefill or decode), None where there is none."""
        for clamp in self.clamps:
            if clamp.site == site and clamp.phase in (phase, "both"):
                return clamp
        return None

    def to_json(self) -> dict[str, object]:
        """The policy as a JSON object with every field."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return fields | {"clamps": [clamp.to_json() for clamp in self.clamps]}

    @classmethod
    def from_json(cls, fields: object, source: str = "policy") -> NumericsPolicy:
        """Read a JSON object; unknown fields are an error, absent ones take the default of `safe`."""
        if not isinstance(fields, dict):
            raise PolicyError(f"{source}: expected a JSON object, found {type(fields).__name__}")
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(fields) - known)
        if unknown:
            raise PolicyError(f"{source}: unknown field {unknown[0]!r}, expected {', '.join(sorted(known))}")
        clamps = fields.get("clamps", [])
        if not isinstance(clamps, list):
            raise PolicyError(f"{source}: field clamps: expected a list, found {type(clamps).__name__}")
        return cls(**{**fields, "clamps": tuple(Clamp.from_json(clamp, source) for clamp in clamps)})
