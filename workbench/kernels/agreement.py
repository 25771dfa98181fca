"""How far a computed tensor is from the arbiter's: one definition for tests, tables and timings.

A result that is not finite is infinitely far from a finite reference: an error of inf fails every bound, where NaN
would make every comparison false.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from workbench.errors import InputError


def _compared(x: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Both in float64 without a graph. Raises InputError for unequal shapes and a reference that is not finite."""
    if x.shape != reference.shape:
        raise InputError(f"agreement: expected shape {tuple(reference.shape)}, found {tuple(x.shape)}")
    wide, reference = x.detach().double(), reference.detach().double()
    if not torch.isfinite(reference).all():
        raise InputError("agreement: expected a finite reference, found NaN or Inf in it")
    return wide, reference


def relative_error(x: Tensor, reference: Tensor) -> float:
    """norm(x - reference) / norm(reference) in Frobenius norm and float64; 0 / 0 is 0, NaN or Inf in x gives inf.

    Over the whole tensor and never per row or element: where a row of the reference is close to zero, correct code
    is far from it relative to that row. `worst_row` says where the largest part of the difference stands.
    """
    wide, reference = _compared(x, reference)
    if not torch.isfinite(wide).all():
        return math.inf
    difference = torch.linalg.vector_norm(wide - reference).item()
    if difference == 0.0:
        return 0.0
    size = torch.linalg.vector_norm(reference).item()
    return difference / size if size > 0.0 else math.inf


def worst_row(x: Tensor, reference: Tensor) -> tuple[tuple[int, ...], float]:
    """Index of the row (all axes but the last) that differs most, and its difference over the largest row norm.

    A row that is not finite counts as infinitely far; the first such row is returned.
    """
    wide, reference = _compared(x, reference)
    distance = torch.linalg.vector_norm(wide - reference, dim=-1)
    distance = distance.masked_fill(~torch.isfinite(distance), math.inf)
    size = torch.linalg.vector_norm(reference, dim=-1).max().item()
    flat = int(distance.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), distance.shape))
    worst = distance.flatten()[flat].item()
    if worst == 0.0:
        return index, 0.0
    return index, worst / size if size > 0.0 else math.inf


def first_bad_row(x: Tensor) -> int | None:
    """Index along axis 1 (time, in the layout [B, T, ...]) of the first NaN or Inf; None where all is finite."""
    bad = (~torch.isfinite(x)).transpose(0, 1).flatten(1).any(1).nonzero()
    return int(bad[0]) if bad.numel() else None


def logit_difference(logits: Tensor, reference: Tensor) -> float:
    """max |logits - reference| / max |reference| over teacher-forced logits; 0 / 0 is 0, and not finite gives inf."""
    wide, reference = _compared(logits, reference)
    if not torch.isfinite(wide).all():
        return math.inf
    difference, size = (wide - reference).abs().max().item(), reference.abs().max().item()
    if difference == 0.0:
        return 0.0
    return difference / size if size > 0.0 else math.inf
