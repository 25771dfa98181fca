"""What a command found out, in the one form that all of them print and write as JSON."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

#: Cause of a fault that no evidence at hand can name.
NOT_ESTABLISHED = "not_established"


@dataclass(frozen=True, slots=True)
class Where:
    """Place of a fault; None where it is unknown or does not apply."""

    layer: int | None = None
    op: str | None = None
    tap: str | None = None
    token: int | None = None
    head: int | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """`verdict` is one sentence. `cause_id` is None without a fault, `NOT_ESTABLISHED` where evidence names
    no cause.

    `evidence` and `ruled_out` are sentences with numbers, `fix` one sentence or None, `confidence` one of
    `established`, `likely`, NOT_ESTABLISHED.
    """

    verdict: str
    where: Where = field(default_factory=Where)
    cause_id: str | None = None
    evidence: tuple[str, ...] = ()
    ruled_out: tuple[str, ...] = ()
    fix: str | None = None
    confidence: str = "established"

    @property
    def is_fault(self) -> bool:
        return self.cause_id is not None

    @property
    def exit_code(self) -> int:
        """0 fine, 1 a fault was found."""
        return int(self.is_fault)

    def to_json(self) -> dict[str, object]:
        """The fields as plain JSON values."""
        fields = dataclasses.asdict(self)
        return fields | {"evidence": list(self.evidence), "ruled_out": list(self.ruled_out)}
