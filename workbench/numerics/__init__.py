"""How a gated delta rule is evaluated in floating point: limits of the formats, the policy, and policies by name."""

from workbench.numerics.formats import EXP_OVERFLOW, EXP_UNDERFLOW, LARGEST, SMALLEST_NORMAL
from workbench.numerics.policy import (
    ACCURATE_SOLVERS,
    CHUNK_SITES,
    CLAMP_SITES,
    CUMSUM_KINDS,
    DECAY_SITES,
    DECODE_SITES,
    EXPONENT_FORMS,
    PHASES,
    SOLVERS,
    Clamp,
    NumericsPolicy,
)
from workbench.numerics.presets import CATALOGUE, PRESETS, SAFE, Prediction, Preset, resolve_policy

__all__ = [
    "ACCURATE_SOLVERS", "CATALOGUE", "CHUNK_SITES", "CLAMP_SITES", "CUMSUM_KINDS", "DECAY_SITES", "DECODE_SITES",
    "EXPONENT_FORMS", "EXP_OVERFLOW", "EXP_UNDERFLOW", "LARGEST", "PHASES", "PRESETS", "SAFE", "SMALLEST_NORMAL",
    "SOLVERS", "Clamp", "NumericsPolicy", "Prediction", "Preset", "resolve_policy",
]  # fmt: skip
