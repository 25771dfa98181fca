"""Numbers in sentences: what is counted in singular or plural, a range that may be one value, sizes and times."""

from __future__ import annotations


def counted(count: int, thing: str) -> str:
    """The number with what is counted: `1 token`, `4,096 tokens`."""
    return f"{count:,} {thing}" + ("" if count == 1 else "s")


def ranged(low: float, high: float, form: str = ".3g") -> str:
    """`low to high`, or the one value where both look alike in `form`."""
    first, last = format(low, form), format(high, form)
    return first if first == last else f"{first} to {last}"


def size_text(n_bytes: float) -> str:
    """``10.6 MiB``, in the largest unit of which there is one."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(n_bytes) >= size:
            return f"{n_bytes / size:.3g} {unit}" if n_bytes / size < 1000 else f"{n_bytes / size:,.0f} {unit}"
    return f"{n_bytes:.0f} bytes"


def duration_text(seconds: float) -> str:
    """``76.2 µs``, in the largest unit of which there is one."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"
