"""What every backend of attention is held to: see `spec` for the contract."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from workbench.kernels.attention import spec
from workbench.kernels.contract import (
    Arguments,
    Contract,
    Law,
    NanProbe,
    bounds_of,
    normal,
    rounding_limit,
    rounding_text,
    same_dtype,
)


def example(
    tokens: int, keys: int | None = None, rows: int = 1, heads: int = 4, kv_heads: int = 2, head_dim: int = 16,
    lengths: Sequence[int] | None = None, packed: Sequence[int] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """A call on drawn inputs: `keys` of each sequence (None: as many as tokens), `lengths` of them that hold one."""
    keys = tokens if keys is None else keys
    sequences = rows if packed is None else len(packed)
    return {
        "q": normal(1, rows, sum(packed) if packed else tokens, heads, head_dim),
        "k": normal(2, sequences, keys, kv_heads, head_dim),
        "v": normal(3, sequences, keys, kv_heads, head_dim),
        "scale": head_dim**-0.5,
        "key_lengths": lengths,
        "cu_seqlens": bounds_of(*packed) if packed else None,
    }


@functools.cache
def cases() -> Mapping[str, Arguments]:
    return {
        "one token": example(1),
        "one token, a past": example(1, keys=70, rows=2),
        "one token, uneven pasts": example(1, keys=70, rows=3, lengths=[70, 1, 33]),
        "prefill": example(37, rows=2),
        "prefill without groups": example(37, heads=3, kv_heads=3),
        "prefill, one key head": example(19, heads=6, kv_heads=1, head_dim=8),
        "prefill onto a past": example(9, keys=40, rows=2),
        "uneven pasts": example(5, keys=40, rows=3, lengths=[40, 5, 17]),
        "spare rows": example(12, keys=64, rows=2, lengths=[12, 12]),
        "sharp": {**example(40, heads=4, kv_heads=4), "scale": 4.0},
        "packed": example(0, keys=30, packed=[30, 1, 7], lengths=[30, 1, 7]),
        "packed onto pasts": example(0, keys=50, packed=[3, 20, 1], lengths=[50, 20, 31]),
        "heads of 64": example(37, rows=2, head_dim=64),
        "packed heads of 256": example(0, keys=50, packed=[3, 20, 1], lengths=[50, 20, 31], heads=8, head_dim=256),
        "heads of 128, prefill": example(37, head_dim=128),
        "heads of 128, packed": example(0, keys=30, head_dim=128, packed=[30, 1, 7], lengths=[30, 1, 7]),
        "heads of 256, one token, uneven pasts": example(1, keys=40, rows=2, head_dim=256, lengths=[40, 17]),
        "512": example(512, rows=2, heads=4, kv_heads=2, head_dim=8),
        "700 onto a past": example(700, keys=790, heads=2, kv_heads=1, head_dim=8),
        "530, uneven pasts": example(
            530, keys=600, rows=2, heads=3, kv_heads=3, head_dim=8, lengths=[600, 531]
        ),
    }  # fmt: skip


@functools.cache
def behind_the_length() -> Mapping[str, Law]:
    """Keys and values that no sequence has yet are changed."""
    laws = {}
    for name, case in cases().items():
        if case["key_lengths"] is None:
            continue
        changed = {**case, "k": case["k"].clone(), "v": case["v"].clone()}
        for s, length in enumerate(case["key_lengths"]):
            changed["k"][s, length:], changed["v"][s, length:] = 50.0, 6e4  # which fp16 holds too
        laws[name] = Law(arguments=case, changed=changed)
    return laws


@functools.cache
def no_future() -> Mapping[str, Law]:
    """The value of one token is changed: no query before it may show that, its own must."""
    laws = {}
    for name, case in cases().items():
        if case["cu_seqlens"] is not None or case["key_lengths"] is not None:
            continue
        tokens, keys = case["q"].shape[1], case["k"].shape[1]
        at = tokens // 2  # the query whose own value changes
        changed = {**case, "v": case["v"].clone()}
        changed["v"][:, keys - tokens + at] = 6e4  # to be seen past a small weight and a coarse rounding
        laws[name] = Law(
            arguments=case, changed=changed,
            same=lambda out, at=at: _rows(out, slice(0, at)), changes=lambda out, at=at: _rows(out, slice(at, at + 1)),
        )  # fmt: skip
    return laws


def _rows(out: Tensor, rows: slice) -> Tensor:
    mask = torch.zeros(out.shape, dtype=torch.bool, device=out.device)
    mask[:, rows] = True
    return mask


@functools.cache
def probes() -> Mapping[str, NanProbe]:
    """A NaN in a query shows in its token and head alone, one in a value in all that read it."""
    query = example(37, rows=2)
    query["q"][1, 20, 3, 5] = math.nan
    decode = example(1, keys=40, rows=3, lengths=[40, 7, 17])
    decode["q"][1, 0, 2, 0] = math.nan
    value = example(37, keys=50, rows=2)
    value["v"][0, 13 + 20, 1, 4] = math.nan  # what query 20 writes
    row, heads = 0, slice(2, 4)  # those that read key head 1

    def reads(out: Tensor, first: int) -> Tensor:
        mask = torch.zeros(out.shape, dtype=torch.bool)
        mask[row, first:, heads, 4] = True
        return mask

    return {
        "a query": NanProbe(arguments=query),
        "the query of one token": NanProbe(arguments=decode),
        "a value": NanProbe(
            arguments=value, must=lambda _output, found: found & reads(found, 20),
            may=lambda _output, found: reads(found, 0),
            reason="a masked weight of 0 times NaN is NaN, so the queries before it may show it too",
        ),
    }  # fmt: skip


CONTRACTS = (
    Contract(
        op=spec.OP, spec=spec, outputs=("out",), cases=cases, limit=rounding_limit(3), tolerance=rounding_text(3),
        output_dtype=same_dtype, probes=probes,
        laws={"keys behind a length are not read": behind_the_length, "no query sees the future": no_future},
    ),
)  # fmt: skip
