"""One question of the probe and its answer, and the verdict over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from workbench.analysis.verdict import Verdict, Where
from workbench.errors import one_line

PASS, FAIL, SKIP = "PASS", "FAIL", "SKIP"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What was asked, PASS, FAIL or SKIP, and what to do next.

    found     one sentence: what was there; of a SKIP the reason, of a FAIL the original error in full
    next_step what to do, of a FAIL always
    cause_id  of a FAIL: what kind of fault it is
    op        the op of ours that it concerns, where there is one
    details   lines to read below it: symbols found, the compiler's last lines
    seconds   how long it took
    """

    name: str
    outcome: str
    found: str
    next_step: str | None = None
    cause_id: str | None = None
    op: str | None = None
    details: tuple[str, ...] = ()
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.outcome not in (PASS, FAIL, SKIP):
            raise ValueError(f"step {self.name}: expected PASS, FAIL or SKIP, found {self.outcome!r}")
        if self.outcome == FAIL and not (self.next_step and self.cause_id):
            raise ValueError(f"step {self.name}: a FAIL needs a next step and a cause")
        # Both come from libraries and compilers, and may hold line ends and terminal sequences.
        object.__setattr__(self, "found", one_line(self.found))
        object.__setattr__(self, "details", tuple(one_line(line) for line in self.details))

    def to_json(self) -> dict[str, object]:
        """The fields as plain JSON values."""
        return asdict(self) | {"details": list(self.details), "seconds": round(self.seconds, 3)}


class Failed(Exception):
    """Ends a check as FAIL: what was found, the next step (None: that of the check), the kind of fault."""

    def __init__(self, found: str, next_step: str | None, cause_id: str, details: Sequence[str] = ()):
        super().__init__(found)
        self.next_step, self.cause_id, self.details = next_step, cause_id, tuple(details)


class Skipped(Exception):
    """Ends a check as SKIP: the reason, and what would make it a check."""

    def __init__(self, reason: str, next_step: str | None = None):
        super().__init__(reason)
        self.next_step = next_step


def verdict_of(steps: Sequence[Step]) -> Verdict:
    """The first FAIL is the verdict, all of them are its evidence; what passed is ruled out."""
    failed = [step for step in steps if step.outcome == FAIL]
    passed = tuple(f"{step.name}: {step.found}" for step in steps if step.outcome == PASS)
    counts = ", ".join(f"{sum(s.outcome == kind for s in steps)} {kind}" for kind in (PASS, FAIL, SKIP))
    if not failed:
        return Verdict(f"no fault found in what is installed here ({counts})", evidence=passed)
    first = failed[0]
    more = "" if len(failed) == 1 else f", and {len(failed) - 1} more below it"
    return Verdict(
        f"{first.name} fails: {first.found}{more} ({counts})", Where(op=first.op), first.cause_id,
        tuple(f"{step.name}: {step.found}" for step in failed), passed, first.next_step,
    )  # fmt: skip
