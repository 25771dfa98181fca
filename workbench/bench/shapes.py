"""Sizes of published models, by the names that timings use: what one GPU holds, also under tensor parallelism.

Splitting over N GPUs divides heads and the width of experts by N; hidden size, experts and head sizes stay. From the
models' config.json: Qwen3.5/3.6-35B-A3B, Qwen3.5-27B (dense: it has no experts), Qwen3.5-397B-A17B, and the miniature
of data/miniature.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from workbench.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of one layer of each kind on one GPU.

    hidden               D
    key_heads, value_heads, key_dim, value_dim, conv_width    of the gated delta rule: H, V, K, W, taps of its window
    experts, top_k, expert_width                              E, A, I; 0 in a dense model
    """

    name: str
    hidden: int
    key_heads: int
    value_heads: int
    key_dim: int = 128
    value_dim: int = 128
    conv_width: int = 4
    experts: int = 0
    top_k: int = 0
    expert_width: int = 0

    @property
    def channels(self) -> int:
        """Of the convolution: q, k and v of all heads."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


WHOLE = {
    shape.name: shape
    for shape in (
        Shape(name="35b-a3b", hidden=2048, key_heads=16, value_heads=32, experts=256, top_k=8, expert_width=512),
        Shape(name="27b", hidden=5120, key_heads=16, value_heads=48),
        Shape(name="397b", hidden=4096, key_heads=16, value_heads=64, experts=512, top_k=10, expert_width=1024),
        Shape(
            name="miniature", hidden=128, key_heads=2, value_heads=4, key_dim=64, value_dim=64, experts=16, top_k=4,
            expert_width=64,
        ),
    )
}  # fmt: skip

_SPLIT = re.compile(r"(?P<name>.+)-tp(?P<ways>\d+)")


def shape_named(name: str) -> Shape:
    """``35b-a3b``, or ``397b-tp8`` for one GPU's part of eight. Raises InputError for other names and splits."""
    match = _SPLIT.fullmatch(name)
    whole, ways = (name, 1) if match is None else (match["name"], int(match["ways"]))
    if whole not in WHOLE:
        raise InputError(f"shape {name!r}: expected one of {', '.join(WHOLE)}, or one of them split as in 397b-tp8")
    shape = WHOLE[whole]
    if match is None:
        return shape
    split = {field: getattr(shape, field) for field in ("key_heads", "value_heads", "expert_width")}
    uneven = [f"{field} {size}" for field, size in split.items() if ways < 1 or size % ways]
    if uneven:
        raise InputError(f"shape {name!r}: expected a number of GPUs that divides {', '.join(uneven)}")
    return replace(shape, name=name, **{field: size // ways for field, size in split.items()})
