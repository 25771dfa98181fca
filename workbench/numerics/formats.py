"""Limits of the floating point formats, and of exp in them."""

from __future__ import annotations

import math

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
