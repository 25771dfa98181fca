"""Policies with a name: what is safe, what shows a fault, what other engines do, and what was tried in the field.

Each of them says what it must be expected to do; tests measure whether it does.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from workbench.errors import PolicyError
from workbench.numerics.formats import EXP_OVERFLOW
from workbench.numerics.policy import Clamp, NumericsPolicy

SAFE = NumericsPolicy()

FP32, FP16 = EXP_OVERFLOW["float32"], EXP_OVERFLOW["float16"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What a policy must do to the op, as functions of the gates of one chunk.

    fails_above   the output is not finite once a chunk decays by more nats than this; None: finite for all gates
    binds_above   a clamp changes the result once a chunk decays by more nats than this; None: no such clamp
    binds_per_token
                  the same for the nats of one token
    repeated_keys (beta, relative error of the output, inf where it is not finite): the same sizes with one key for all
                  tokens and -1e-3 a token, to within a factor of 10: such an error is rounding alone
    constant      (log decay of every token, relative error of the output): 256 tokens, one head of 64, chunks of 64
    diverges      prefill and decode differ where a clamp binds in only one of them
    """

    fails_above: float | None = None
    binds_above: float | None = None
    binds_per_token: float | None = None
    constant: tuple[tuple[float, float], ...] = ()
    repeated_keys: tuple[tuple[float, float], ...] = ()
    diverges: bool = False

    def in_words(self) -> str:
        """All of it in one line; `finite` where there is nothing else to say."""
        parts = []
        if self.fails_above is not None:
            parts.append(f"not finite once a chunk decays by more than {self.fails_above:.1f} nats")
        if self.binds_above is not None:
            parts.append(f"binds once a chunk decays by more than {self.binds_above:g} nats")
        if self.binds_per_token is not None:
            parts.append(f"binds where a token decays by more than {self.binds_per_token:g}")
        if self.constant:
            parts.append("error " + ", ".join(f"{error:g} at {gate:g} a token" for gate, error in self.constant))
        if self.repeated_keys:
            found = ("not finite" if error == math.inf else f"error {error:.0e}" for _, error in self.repeated_keys)
            at = (f" at beta {beta:g}" for beta, _ in self.repeated_keys)
            parts.append("one key for all tokens: " + ", ".join(map(str.__add__, found, at)))
        if self.diverges:
            parts.append("prefill and decode differ where it binds")
        return "; ".join(parts) or "finite"


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A policy with a name: `origin` says whose it is and why, `prediction` what it does."""

    policy: NumericsPolicy
    origin: str
    prediction: Prediction


def _unsafe(exponent: str, cumsum: str = "float32") -> NumericsPolicy:
    return NumericsPolicy(exponent=exponent, cumsum=cumsum)


def _clamped(*clamps: Clamp, solver: str = "row_loop") -> NumericsPolicy:
    """What the field notes started from: an fp32 cumulative sum, differences masked, rows solved one by one."""
    return NumericsPolicy(cumsum="float32", solver=solver, clamps=clamps)


def _around(site: str, phase: str, limit: float) -> Clamp:
    return Clamp(site=site, phase=phase, lo=-limit, hi=limit)


_GATES_20 = (_around("A_log", "both", 20.0), _around("decode_gate", "decode", 20.0))

#: Name -> preset. The first is the default.
CATALOGUE: dict[str, Preset] = {
    "safe": Preset(
        policy=SAFE, origin="differences of a float64 sum, masked before exp: every factor lies in [0, 1]",
        prediction=Prediction(constant=((-1.0, 1e-6), (-20.0, 1e-6))),
    ),
    "fp32_cumsum": Preset(
        policy=NumericsPolicy(cumsum="float32"),
        origin="differences of an fp32 sum: finite, but they cancel where strong and weak gates share a chunk",
        prediction=Prediction(constant=((-1.0, 1e-6), (-20.0, 1e-6))),
    ),
    "segsum": Preset(
        policy=NumericsPolicy(cumsum="segsum"), origin="every window summed by itself in fp32: nothing cancels",
        prediction=Prediction(constant=((-1.0, 1e-6), (-20.0, 1e-6))),
    ),
    "factored": Preset(
        policy=_unsafe("factored"), origin="two vectors in the place of a matrix of exponentials",
        prediction=Prediction(fails_above=FP32),
    ),
    "factored_mask_after": Preset(
        policy=_unsafe("factored_mask_after"), origin="the same, the upper triangle set to zero and not multiplied",
        prediction=Prediction(fails_above=FP32),
    ),
    "midpoint": Preset(
        policy=_unsafe("midpoint"), origin="factored around the middle of the chunk, as kernels for bounded gates do",
        prediction=Prediction(fails_above=2 * FP32),
    ),
    "mask_after": Preset(
        policy=_unsafe("mask_after"), origin="exp of every difference, then a where: right forward, NaN in gradients",
        prediction=Prediction(),
    ),
    "multiply_mask": Preset(
        policy=_unsafe("multiply_mask"), origin="exp of every difference, then times a 0/1 mask",
        prediction=Prediction(fails_above=FP32),
    ),
    "bf16_cumsum": Preset(
        policy=NumericsPolicy(cumsum="bfloat16"), origin="the sum held in bfloat16, as a kernel's narrow buffer does",
        prediction=Prediction(constant=((-0.3, 2e-2), (-1.38, 3e-2))),
    ),
    "fp16_factored": Preset(
        policy=_unsafe("factored", "float16"), origin="the factored form on a card that computes in fp16 alone",
        prediction=Prediction(fails_above=FP16),
    ),
    "doubling": Preset(
        policy=NumericsPolicy(solver="doubling"),
        origin="a series for the inverse by repeated squaring, as kernels without a triangular solve use",
        prediction=Prediction(
            constant=((-1.0, 1e-6),), repeated_keys=((0.5, 5e7), (0.835, 2e34), (0.95, math.inf), (1.0, math.inf)),
        ),
    ),
    "transformers": Preset(
        policy=NumericsPolicy(cumsum="float32", solver="row_loop"),
        origin="transformers' torch_chunk_gated_delta_rule: differences masked before exp, rows one by one, chunk 64",
        prediction=Prediction(constant=((-1.0, 1e-6), (-20.0, 1e-6))),
    ),
    "fla": Preset(
        policy=NumericsPolicy(cumsum="float32", solver="block_substitution"),
        origin="flash-linear-attention's Triton kernels: fp32 sums per chunk of 64, 16-row inverses merged",
        prediction=Prediction(constant=((-1.0, 1e-6), (-20.0, 1e-6))),
    ),
    "vllm": Preset(
        policy=NumericsPolicy(cumsum="float32", solver="block_substitution"),
        origin="vLLM's Triton prefill, taken over from flash-linear-attention",
        prediction=Prediction(constant=((-1.0, 1e-6), (-20.0, 1e-6))),
    ),
    "flashinfer": Preset(
        policy=NumericsPolicy(cumsum="float32", solver="block_substitution"),
        origin="FlashInfer's prefill kernels: chunks of 64, an inverse by blocks; they take exp(g) in fp32 and not g",
        prediction=Prediction(constant=((-1.0, 1e-6), (-20.0, 1e-6))),
    ),
    "clamp_cumsum_20": Preset(
        policy=_clamped(_around("cumsum", "prefill", 20.0), *_GATES_20),
        origin="first repair in the field: cumulative gates, A_log and the decode gate within +-20",
        prediction=Prediction(binds_above=20.0, constant=((-0.3, 1e-6), (-1.0, 3.2)), diverges=True),
    ),
    "clamp_cumsum_20_prefill": Preset(
        policy=_clamped(_around("cumsum", "prefill", 20.0), _around("A_log", "prefill", 20.0)),
        origin="the same before decode was thought of: its gates stay as they are",
        prediction=Prediction(binds_above=20.0, constant=((-0.3, 1e-6), (-1.0, 3.2)), diverges=True),
    ),
    "clamp_all_exponents_80": Preset(
        policy=_clamped(*(_around(site, "prefill", 80.0) for site in
                          ("cumsum", "k_decay", "inter_attention", "state_update"))),
        origin="every argument of exp within +-80, just inside the fp32 limit",
        prediction=Prediction(binds_above=80.0, constant=((-1.0, 1e-6), (-5.0, 3.9)), diverges=True),
    ),
    "clamp_gate_5_2": Preset(
        policy=_clamped(Clamp(site="raw_gate", lo=-5.0, hi=2.0), _around("state", "both", 65504.0)),
        origin="each gate within [-5, 2] and the state within what fp16 holds, as a fused kernel did",
        prediction=Prediction(binds_per_token=5.0, constant=((-1.0, 1e-6), (-6.0, 4e-3))),
    ),
    "five_clamps": Preset(
        policy=_clamped(
            _around("raw_gate", "prefill", 0.5), _around("cumsum", "prefill", 12.0), _around("A_log", "both", 5.0),
            _around("solve_rows", "prefill", 1e4), _around("state", "both", 1e4),
        ),
        origin="five clamps at once, after the first ones had not cured the NaN",
        prediction=Prediction(
            binds_above=12.0, binds_per_token=0.5, constant=((-0.1, 1e-6), (-1.0, 2.9)), diverges=True
        ),
    ),
    "nan_to_num": Preset(
        policy=NumericsPolicy(exponent="factored", cumsum="float32", nan_to_num=True),
        origin="zero for each NaN, the largest number for each infinity in output and state, on top of a form that "
        "overflows: kept to show what it destroys",
        prediction=Prediction(),
    ),
}  # fmt: skip

#: Policies that can be asked for by name.
PRESETS: dict[str, NumericsPolicy] = {name: preset.policy for name, preset in CATALOGUE.items()}


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
