"""Which rows are wrong names the fault: the pattern of bad tokens, heads and requests, what may cause it and what not.

    reading = read_pattern(bad, chunk=64)          # bad [T, V]: which token of which head is wrong
    reading.pattern.allows, reading.pattern.rules_out

A pattern is evidence, not proof: several causes leave the same rows. Those that a pattern rules out could not have left
them. Each entry of PATTERNS is held to a fault that makes it by tests/test_patterns.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.errors import InputError


@dataclass(frozen=True, slots=True)
class Pattern:
    """`rows` says which rows are wrong, `allows` the causes that leave them, `rules_out` those that cannot."""

    name: str
    rows: str
    allows: tuple[str, ...]
    rules_out: tuple[str, ...]


FACTORED = "factored exponent exp(G_i) exp(-G_j): past the limit of exp the whole chunk is 0 * inf"
FACTORED_WHERE = "factored exponent under a where mask: only rows past the limit of exp are spoiled"
MULTIPLIED_MASK = "0/1 mask multiplied after exp: inf * 0 where a strong gate follows"
MASK_AFTER = "mask taken after exp: the discarded inf still reaches the rows before a strong gate"
NAN_INPUT = "a value that is not finite, or wrong, in the inputs from this token on"
DISPATCH = "another kernel or code path from this row count on"
HANDOFF = "the state is lost, stale or of another sequence where one chunk or pass hands it to the next"
BOUNDARY = "rows at a chunk's edge: padding, an out-of-bounds read, a mask off by one"
HEAD_MAP = "value heads mapped to key heads by tiling instead of repeating"
ADDRESSING = "a fixed offset: an address or index that is wrong at this token alone"
WEIGHTS = "weights, layout or another op that acts on every token alike"
UNINITIALISED = "memory that is read before anything was written to it"
CACHE = "the cache or the state pool: what the first request left behind"
PRECISION = "digits lost inside the op: the rows that need them are off, by their gates and keys"
ONE_HEAD = "a gate strong enough, or a weight, that only these heads have"

PATTERNS: dict[str, Pattern] = {
    p.name: p
    for p in (
        Pattern("none", "no row is wrong", (), (FACTORED, NAN_INPUT, HANDOFF, WEIGHTS)),
        Pattern(
            "every_row", "every row, from the first token on", (WEIGHTS, FACTORED, UNINITIALISED),
            (HANDOFF, DISPATCH, MASK_AFTER, FACTORED_WHERE),
        ),
        Pattern(
            "from_chunk_on", "every row from the start of a chunk on", (FACTORED, NAN_INPUT, HANDOFF, DISPATCH),
            (WEIGHTS, MULTIPLIED_MASK, MASK_AFTER, ADDRESSING),
        ),
        Pattern(
            "from_token_on", "every row from one token inside a chunk on", (NAN_INPUT, FACTORED_WHERE),
            (FACTORED, MULTIPLIED_MASK, MASK_AFTER, WEIGHTS),
        ),
        Pattern(
            "whole_chunks", "whole chunks, with sound ones after them", (FACTORED, UNINITIALISED),
            (NAN_INPUT, HANDOFF, WEIGHTS, MASK_AFTER),
        ),
        Pattern(
            "first_rows", "the first rows of chunks, up to a token of each", (MULTIPLIED_MASK, MASK_AFTER, BOUNDARY),
            (FACTORED, FACTORED_WHERE, NAN_INPUT, WEIGHTS),
        ),
        Pattern(
            "last_rows", "the last rows of chunks, from a token of each on", (FACTORED_WHERE, BOUNDARY),
            (FACTORED, MASK_AFTER, MULTIPLIED_MASK, WEIGHTS),
        ),
        Pattern(
            "chunk_starts", "the first row of every chunk but the first, and no other", (BOUNDARY, HANDOFF),
            (FACTORED, MASK_AFTER, NAN_INPUT, WEIGHTS),
        ),
        Pattern("one_token", "one token alone", (ADDRESSING,), (FACTORED, HANDOFF, NAN_INPUT, WEIGHTS)),
        Pattern(
            "scattered", "rows that follow no rule of place", (PRECISION, ADDRESSING, UNINITIALISED),
            (FACTORED, DISPATCH),
        ),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class HeadPattern:
    """Which heads are wrong, and what that alone allows."""

    name: str
    heads: str
    allows: tuple[str, ...]


HEAD_PATTERNS: dict[str, HeadPattern] = {
    p.name: p
    for p in (
        HeadPattern("all", "every head", ()),
        HeadPattern("mapped", "the heads that tiling gives another key head than repeating does", (HEAD_MAP,)),
        HeadPattern("some", "some heads alone", (ONE_HEAD,)),
    )
}

#: What requests that came one after another tell.
REQUEST_PATTERNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "first_only": ("the first request alone", (UNINITIALISED,)),
    "after_first": ("every request but the first", (CACHE, HANDOFF)),
    "all": ("every request", (WEIGHTS, FACTORED)),
    "none": ("no request", ()),
    "some": ("some requests alone", (CACHE, ADDRESSING)),
}


@dataclass(frozen=True, slots=True)
class Reading:
    """What the bad rows of an output say.

    pattern  of PATTERNS, that of every bad head (`scattered` where heads differ)
    heads    of HEAD_PATTERNS; `numbers` are the bad heads
    first    the first bad token of any head, None where there is none
    gate     the token of the strongest gate right after the first bad rows, None where gates were not given or do not
             tell: it sets MASK_AFTER apart from BOUNDARY
    """

    pattern: Pattern
    heads: HeadPattern
    numbers: tuple[int, ...]
    first: int | None
    gate: int | None = None

    @property
    def allows(self) -> tuple[str, ...]:
        """Causes that leave these rows in these heads, likeliest first."""
        causes = self.pattern.allows
        if self.heads.name == "mapped":
            return (HEAD_MAP, *(cause for cause in causes if cause != WEIGHTS))
        if self.gate is not None and MASK_AFTER in causes:
            return (MASK_AFTER, *(cause for cause in causes if cause not in (MASK_AFTER, BOUNDARY)))
        if self.heads.name == "some":  # what acts on every head alike is no cause of these
            return (*(cause for cause in causes if cause not in (WEIGHTS, DISPATCH)), ONE_HEAD)
        return causes

    def __str__(self) -> str:
        if self.first is None:
            return self.pattern.rows
        heads = ", ".join(map(str, self.numbers))
        return f"{self.pattern.rows}, the first at token {self.first}; {self.heads.heads} ({heads})"


def read_pattern(
    bad: Tensor, *, chunk: int, key_heads: int | None = None, log_decay: Tensor | None = None
) -> Reading:
    """The pattern of `bad` [T, V] (bool), the rows of an output of the gated delta rule that are wrong.

    `chunk` is the number of rows of a chunk; `key_heads` lets a wrong head map be recognised; `log_decay` [T, V] the
    gate that follows the rows. Raises InputError for other shapes.
    """
    if bad.dim() != 2 or bad.dtype != torch.bool or not bad.numel():
        raise InputError(f"pattern: expected bad rows [T, V] of bool, found {bad.dtype} {tuple(bad.shape)}")
    if log_decay is not None and log_decay.shape != bad.shape:
        raise InputError(f"pattern: log_decay: expected {tuple(bad.shape)} as bad, found {tuple(log_decay.shape)}")
    if key_heads is not None and (key_heads < 1 or bad.shape[1] % key_heads):
        raise InputError(f"pattern: key_heads: expected a divisor of {bad.shape[1]} heads, found {key_heads}")
    if chunk < 1:
        raise InputError(f"pattern: chunk: expected at least 1, found {chunk}")
    numbers = tuple(int(head) for head in bad.any(0).nonzero().flatten())
    if not numbers:
        return Reading(PATTERNS["none"], HEAD_PATTERNS["all"], (), None)
    found = {_rows_pattern(bad[:, head], chunk) for head in numbers}
    name = found.pop() if len(found) == 1 else _union_pattern(bad, numbers, chunk)
    first = int(bad.any(1).nonzero()[0])
    gate = None if log_decay is None else _gate_after(bad, log_decay, numbers[0], chunk)
    return Reading(PATTERNS[name], _head_pattern(numbers, bad.shape[1], key_heads), numbers, first, gate)


def _union_pattern(bad: Tensor, numbers: Sequence[int], chunk: int) -> str:
    """Heads whose own gates spoil them from different chunks on agree in kind, or they do not agree at all."""
    kinds = {_rows_pattern(bad[:, head], chunk) for head in numbers}
    if kinds <= {"every_row", "from_chunk_on"}:
        return "from_chunk_on"
    if kinds <= {"first_rows", "from_token_on", "last_rows"} and "first_rows" not in kinds:
        return "last_rows"
    return "scattered"


def _rows_pattern(bad: Tensor, chunk: int) -> str:
    """The pattern of the rows [T] of one head."""
    tokens = bad.shape[0]
    rows = bad.nonzero().flatten().tolist()
    first, last = rows[0], rows[-1]
    is_run = last - first + 1 == len(rows)
    if is_run and last == tokens - 1 and len(rows) > 1:
        if first == 0:
            return "every_row"
        return "from_chunk_on" if first % chunk == 0 else "from_token_on"
    if len(rows) == 1:
        return "chunk_starts" if first % chunk == 0 and first > 0 and tokens <= 2 * chunk else "one_token"
    if rows == list(range(chunk, tokens, chunk)):
        return "chunk_starts"
    parts = [bad[start : start + chunk] for start in range(0, tokens, chunk)]
    spoiled = [part for part in parts if bool(part.any())]
    if all(bool(part.all()) for part in spoiled):
        return "whole_chunks"
    if all(bool(part[: int(part.sum())].all()) for part in spoiled):
        return "first_rows"
    if all(bool(part[len(part) - int(part.sum()) :].all()) for part in spoiled):
        return "last_rows"
    return "scattered"


def _head_pattern(numbers: tuple[int, ...], heads: int, key_heads: int | None) -> HeadPattern:
    if len(numbers) == heads:
        return HEAD_PATTERNS["all"]
    if key_heads is not None and 1 < key_heads < heads:
        groups = heads // key_heads
        mapped = tuple(head for head in range(heads) if head // groups != head % key_heads)
        if numbers == mapped:
            return HEAD_PATTERNS["mapped"]
    return HEAD_PATTERNS["some"]


def _gate_after(bad: Tensor, log_decay: Tensor, head: int, chunk: int) -> int | None:
    """The token right after the first run of bad rows, if its gate is the strongest of its chunk."""
    rows = bad[:, head].nonzero().flatten().tolist()
    end = next((row for row in range(rows[0], bad.shape[0]) if not bool(bad[row, head])), None)
    if end is None:
        return None
    start = end // chunk * chunk
    strongest = start + int(log_decay[start : start + chunk, head].argmin())
    return end if strongest == end else None


def read_requests(bad: Sequence[bool]) -> str:
    """The key of REQUEST_PATTERNS for requests in the order in which they came; `bad` says which were wrong."""
    if not len(bad):
        raise InputError("pattern: expected at least one request, found none")
    if not any(bad):
        return "none"
    if all(bad):
        return "all"
    if bad[0] and not any(bad[1:]):
        return "first_only"
    return "after_first" if not bad[0] and all(bad[1:]) else "some"
