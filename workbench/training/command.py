"""What the commands of this package have in common: an error is one line on standard error and exit code 2."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

from workbench.errors import WorkbenchError, one_line


def one_line_errors(main: Callable[..., int]) -> Callable[..., int]:
    """A `main` that returns 2 for input it cannot use; what is no such error passes."""

    @functools.wraps(main)
    def checked(arguments: list[str] | None = None) -> int:
        try:
            return main(arguments)
        except (WorkbenchError, OSError) as error:
            print(f"error: {one_line(str(error))}", file=sys.stderr)
            return 2

    return checked
