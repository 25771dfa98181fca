"""Names of the vendors that something is known of, for a check before torch is imported."""

from __future__ import annotations

import re
from collections.abc import Sequence

from workbench.errors import InputError

KNOWN = ("ixformer", "corex_gdn", "corex_moe", "corex_fa2")


def check_vendor(name: str | None, symbols: Sequence[str]) -> None:
    """Raises InputError for what is no name of a package, and for one that nothing is known of without `symbols`."""
    if name is None or name in KNOWN:
        return
    if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", name):
        raise InputError(f"--vendor {name!r}: expected one of {', '.join(KNOWN)}, or the name of a Python package")
    if not symbols:
        raise InputError(
            f"--vendor {name}: expected one of {', '.join(KNOWN)}; of another package name the functions to look for "
            "with --symbol"
        )
