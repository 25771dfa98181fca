"""How a gated delta rule is evaluated in floating point: limits of the formats and the policy that picks a form.

Data only. A backend that cannot honour a policy refuses it with the reason; none ignores one.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from workbench.errors import PolicyError

#: Largest finite value and smallest positive normal value per format (IEEE 754; bfloat16 as in its definition).
LARGEST = {
    "float64": 1.7976931348623157e308,
    "float32": 3.4028234663852886e38,
    "bfloat16": 3.3895313892515355e38,
    "float16": 65504.0,
}
SMALLEST_NORMAL = {
    "float64": 2.2250738585072014e-308,
    "float32": 1.1754943508222875e-38,
    "bfloat16": 1.1754943508222875e-38,
    "float16": 6.103515625e-05,
}

#: exp(x) is infinite above this: 88.72 nats in float32 and bfloat16, 11.09 in float16.
EXP_OVERFLOW = {name: math.log(value) for name, value in LARGEST.items()}

#: exp(-x) is zero above this (half of the smallest subnormal): 103.97 nats in float32, 17.33 in float16.
EXP_UNDERFLOW = {"float64": 745.13, "float32": 103.97, "bfloat16": 92.88, "float16": 17.33}

EXPONENT_FORMS = {
    "difference_then_mask": "exp of (G_i - G_j) with -inf above the diagonal: no argument is positive",
    "mask_after": "exp of every G_i - G_j, upper triangle set to zero afterwards: gradients become NaN past the limit",
    "multiply_mask": "exp of every G_i - G_j times a 0/1 mask: inf * 0 = NaN past the limit",
    "factored": "exp(G_i) * exp(-G_j) times a 0/1 mask: past the limit the second factor is inf, the whole chunk NaN",
    "factored_mask_after": "exp(G_i) * exp(-G_j), upper triangle zero: at the limit one row is bad, past it the chunk",
}
CUMSUM_KINDS = {
    "float64": "cumulative sum and its differences in float64, rounded to float32 before exp",
    "float32": "cumulative sum and its differences in float32: cancels when strong and weak gates share a chunk",
    "segsum": "every window summed by itself in float32: no cancellation, C times the additions",
}
SOLVERS = {
    "block_substitution": "8-row blocks by substitution, merged to 32-row inverses, then block by block",
    "solve_triangular": "torch.linalg.solve_triangular on the unit lower triangular system",
    "row_loop": "forward substitution one row at a time: needs no solver library",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class NumericsPolicy:
    """Form of evaluation of the chunked gated delta rule.

    Fields: `exponent` (see `EXPONENT_FORMS`), `cumsum` (see `CUMSUM_KINDS`), `state_dtype` of the recurrent state,
    `solver` (see `SOLVERS`), `chunk` rows per chunk, `clamps` (reserved in the JSON format; this version has none
    and refuses a policy that asks for one). The default needs no clamp: each exponent is a sum of non-positive
    terms, so every factor lies in [0, 1] in any format. Raises PolicyError for an unknown value.
    """

    exponent: str = "difference_then_mask"
    cumsum: str = "float64"
    state_dtype: str = "float32"
    solver: str = "block_substitution"
    chunk: int = 64
    clamps: tuple[Mapping[str, object], ...] = ()

    def __post_init__(self) -> None:
        for field, known in (("exponent", EXPONENT_FORMS), ("cumsum", CUMSUM_KINDS), ("solver", SOLVERS)):
            value = getattr(self, field)
            if not isinstance(value, str) or value not in known:
                raise PolicyError(f"policy field {field}: expected one of {', '.join(known)}, found {value!r}")
        if self.state_dtype not in ("float32", "float64"):
            raise PolicyError(
                f"policy field state_dtype: expected float32 or float64, found {self.state_dtype!r}; "
                "a narrower recurrent state drifts with length"
            )
        if isinstance(self.chunk, bool) or not isinstance(self.chunk, int) or not 1 <= self.chunk <= 1024:
            raise PolicyError(f"policy field chunk: expected a whole number from 1 to 1024, found {self.chunk!r}")
        if self.clamps:
            raise PolicyError(
                f"policy field clamps: expected an empty list, found {len(self.clamps)} clamps; "
                "no backend of this version implements clamps, remove them from the policy"
            )

    def to_json(self) -> dict[str, object]:
        """The policy as a JSON object with every field."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)} | {"clamps": list(self.clamps)}

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
        return cls(**{**fields, "clamps": tuple(clamps)})


SAFE = NumericsPolicy()

#: Policies that can be asked for by name.
PRESETS: dict[str, NumericsPolicy] = {
    "safe": SAFE,
    "fp32_cumsum": NumericsPolicy(cumsum="float32"),
    "segsum": NumericsPolicy(cumsum="segsum"),
    "factored": NumericsPolicy(exponent="factored", cumsum="float32"),
    "factored_mask_after": NumericsPolicy(exponent="factored_mask_after", cumsum="float32"),
    "mask_after": NumericsPolicy(exponent="mask_after", cumsum="float32"),
    "multiply_mask": NumericsPolicy(exponent="multiply_mask", cumsum="float32"),
}


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"field {name!r} appears twice")
    return dict(pairs)


def resolve_policy(policy: NumericsPolicy | str | Path | None) -> NumericsPolicy:
    """A policy from itself, a preset's name, or the path of a JSON file; None is `safe`."""
    if policy is None:
        return SAFE
    if isinstance(policy, NumericsPolicy):
        return policy
    if not isinstance(policy, (str, Path)):
        raise PolicyError(
            f"policy: expected a NumericsPolicy, a preset's name or a file, found {type(policy).__name__}; "
            "NumericsPolicy.from_json reads an object"
        )
    if isinstance(policy, str) and policy in PRESETS:
        return PRESETS[policy]
    path = Path(policy)
    if not path.is_file():
        raise PolicyError(
            f"policy {str(policy)!r}: neither a preset ({', '.join(PRESETS)}) nor a file; give one of them"
        )
    try:
        fields = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_duplicates)
    except OSError as error:
        raise PolicyError(f"policy file {path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, a number too long, nested too deeply
        raise PolicyError(f"policy file {path}: not JSON ({error})") from error
    return NumericsPolicy.from_json(fields, source=f"policy file {path}")
