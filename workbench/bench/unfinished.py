"""Cases of a long benchmark that are measured already: kept beside the result, so that an interrupted run goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from workbench.errors import InputError


class Unfinished:
    """Rows by case in ``<name>.unfinished.json`` of `folder`, for as long as the benchmark has no result.

    `measured` says what is measured (commit, checkpoint, hashes of texts, in types of JSON); cases that were measured
    of anything else are not taken. `done` holds the rows of each case that is over. `say` gets a line on what was
    found. Raises InputError for a file that this class did not write.
    """

    def __init__(self, folder: Path, name: str, measured: Mapping[str, object], say: Callable[[str], None]):
        self.path = Path(folder) / f"{name}.unfinished.json"
        self.measured = dict(measured)
        self.done: dict[str, list[dict]] = {}
        if not self.path.is_file():
            return
        try:
            before = json.loads(self.path.read_text(encoding="utf-8"))
            known, done = before["measured"], dict(before["done"])
        except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
            raise InputError(f"{self.path}: expected cases of an interrupted run, found {error!r}; remove it") from None
        if known == self.measured:
            self.done = done
            say(f"{self.path}: going on after {len(done)} cases")
        else:
            say(f"{self.path}: of another commit, checkpoint, text or setting: starting anew")

    def add(self, case: str, rows: list[dict]) -> None:
        """Keep the rows of a case that is over; the file is complete at every moment."""
        self.done[case] = rows
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps({"measured": self.measured, "done": self.done}), encoding="utf-8")
        os.replace(partial, self.path)

    def remove(self) -> None:
        """The result is written: nothing is unfinished."""
        self.path.unlink(missing_ok=True)
