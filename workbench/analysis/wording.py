"""Numbers in sentences: what is counted in singular or plural, and a range that may be one value."""

from __future__ import annotations


def counted(count: int, thing: str) -> str:
    """The number with what is counted: `1 token`, `4,096 tokens`."""
    return f"{count:,} {thing}" + ("" if count == 1 else "s")


def ranged(low: float, high: float, form: str = ".3g") -> str:
    """`low to high`, or the one value where both look alike in `form`."""
    first, last = format(low, form), format(high, form)
    return first if first == last else f"{first} to {last}"
