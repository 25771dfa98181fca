"""Where every tensor of a checkpoint's files went, and what casting it cost.

Each stored tensor is in exactly one class: `loaded` (became one canonical tensor), `merged` (became part of
one, or was split into several), `skipped` (on purpose, with the reason) or `unexpected` (allowed by name).
`missing` rows stand for tensors that no file holds and that were allowed to be absent.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from workbench.checkpoint.header import StoredFile
from workbench.errors import CheckpointError

if TYPE_CHECKING:
    import pandas

LOADED, MERGED, SKIPPED, UNEXPECTED, MISSING = "loaded", "merged", "skipped", "unexpected", "missing"
CLASSES = (LOADED, MERGED, SKIPPED, UNEXPECTED, MISSING)


@dataclass(frozen=True, slots=True)
class AccountingRow:
    """One tensor. `canonical` holds several names, joined by ", ", when the stored tensor was split."""

    kind: str  # one of CLASSES
    file: str | None  # None for a missing tensor
    stored_name: str | None
    canonical: str | None
    reason: str
    dtype: str | None
    shape: tuple[int, ...]
    n_bytes: int  # in the file; 0 for a missing tensor


@dataclass(frozen=True, slots=True)
class FileBytes:
    """Size of one file on disk and its two parts."""

    name: str
    file_bytes: int
    header_bytes: int
    tensor_bytes: int


@dataclass(frozen=True, slots=True)
class Accounting:
    """All tensors, files and narrowing casts. Making one checks that the bytes add up (`CheckpointError`)."""

    rows: tuple[AccountingRow, ...]
    files: tuple[FileBytes, ...]
    notes: tuple[str, ...] = ()  # files left alone, settings taken from the weights
    narrowing: tuple["NarrowedTensor", ...] = ()
    expert_layouts: tuple[tuple[str, str], ...] = ()  # (experts of a layer, layout that the files hold them in)
    assumptions: tuple[str, ...] = ()  # those of the notes on what the weights mean: layouts taken on the family's word

    def __post_init__(self) -> None:
        accounted = dict.fromkeys((file.name for file in self.files), 0)
        for row in self.rows:
            if row.file is not None:
                accounted[row.file] += row.n_bytes
        for file in self.files:
            if file.header_bytes + accounted[file.name] != file.file_bytes:
                raise CheckpointError(
                    f"{file.name}: expected header and tensors to add up to {file.file_bytes} bytes, found "
                    f"{file.header_bytes} + {accounted[file.name]}"
                )

    @property
    def totals(self) -> dict[str, tuple[int, int]]:
        """Class -> (number of tensors, bytes in the files), for all five classes."""
        totals = dict.fromkeys(CLASSES, (0, 0))
        for row in self.rows:
            count, n_bytes = totals[row.kind]
            totals[row.kind] = (count + 1, n_bytes + row.n_bytes)
        return totals

    @property
    def file_bytes(self) -> int:
        """Bytes on disk of all weight files."""
        return sum(file.file_bytes for file in self.files)

    @property
    def header_bytes(self) -> int:
        """Bytes of all headers, length fields included."""
        return sum(file.header_bytes for file in self.files)

    def summary(self) -> str:
        """One line per class, then the sum that must equal the size of the files."""
        lines = [f"{kind:<11}{n:>7} tensors {n_bytes:>16,} B" for kind, (n, n_bytes) in self.totals.items()]
        lines.append(f"{'headers':<11}{len(self.files):>7} files   {self.header_bytes:>16,} B")
        lines.append(f"{'sum':<11}{'':>7}         {self.file_bytes:>16,} B = size of the files")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def to_frame(self) -> "pandas.DataFrame":
        """All rows as a table, columns in the order of `AccountingRow`."""
        return _table(AccountingRow, self.rows)

    def narrowing_frame(self) -> "pandas.DataFrame":
        """All narrowing casts as a table, columns in the order of `NarrowedTensor`."""
        return _table(NarrowedTensor, self.narrowing)


def _table(record: type, rows: tuple) -> "pandas.DataFrame":
    import pandas  # here, so that reading a checkpoint does not pay for it

    names = list(record.__dataclass_fields__)
    return pandas.DataFrame([[getattr(row, name) for name in names] for row in rows], columns=names)


def file_bytes_of(files: list[StoredFile]) -> tuple[FileBytes, ...]:
    """Sizes of checked files, in their order."""
    return tuple(
        FileBytes(file.path.name, file.file_bytes, file.header_bytes, file.tensor_bytes) for file in files
    )


# ============================================================================================================
# Narrowing casts
# ============================================================================================================


@dataclass(frozen=True, slots=True)
class NarrowedTensor:
    """What a cast to a dtype of smaller range or precision did to one tensor, beyond rounding."""

    name: str
    from_dtype: str
    to_dtype: str
    numel: int
    n_overflow: int  # finite before, infinite after
    n_flushed: int  # not zero before, zero after
    absmax: float  # of the finite values before the cast


# A cast along one of these keeps every value exactly.
_WIDENING = {
    (torch.float16, torch.float32), (torch.float16, torch.float64), (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.float64), (torch.float32, torch.float64),
}  # fmt: skip

# Elements looked at together: the temporaries of a check on a tensor of a gigabyte stay small.
BLOCK_ELEMENTS = 1 << 22


def cast(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, NarrowedTensor | None]:
    """`tensor` in `dtype`, with the record of a narrowing cast (None where no value can change)."""
    result = tensor.to(dtype)
    if tensor.dtype == dtype or (tensor.dtype, dtype) in _WIDENING:
        return result, None
    n_overflow = n_flushed = 0
    absmax = 0.0
    blocks = zip(tensor.flatten().split(BLOCK_ELEMENTS), result.flatten().split(BLOCK_ELEMENTS), strict=True)
    for before, after in blocks:
        finite = before.isfinite()
        n_overflow += int((finite & after.isinf()).sum())
        n_flushed += int(((before != 0) & (after == 0)).sum())
        if finite.any():
            absmax = max(absmax, float(before[finite].abs().max()))
    dtypes = (str(d).removeprefix("torch.") for d in (tensor.dtype, dtype))
    return result, NarrowedTensor(name, *dtypes, tensor.numel(), n_overflow, n_flushed, absmax)
