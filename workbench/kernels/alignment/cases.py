"""What every backend of the alignment is held to: see `spec` for the contract."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from workbench.kernels.alignment import spec
from workbench.kernels.contract import Arguments, Contract, tokens_text


def choices(tokens: int, count: int, top_k: int, seed: int = 0) -> Tensor:
    """[tokens, top_k] distinct experts of each token, drawn."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, count, generator=generator).argsort(-1)[:, :top_k]


SIZES = (
    (0, 8, 2, 1), (1, 8, 2, 1), (1, 2, 1, 16), (15, 8, 3, 2), (16, 8, 3, 2), (40, 12, 12, 8), (33, 5, 1, 1),
    (100, 256, 8, 1), (100, 256, 8, 16), (64, 32, 4, 16), (7, 300, 8, 128),
)  # fmt: skip


@functools.cache
def cases() -> Mapping[str, Arguments]:
    found = {
        f"{tokens_text(tokens)}, top {top_k} of {count}, blocks of {block}": {
            "experts": choices(tokens, count, top_k), "num_experts": count, "block": block,
        }
        for tokens, count, top_k, block in SIZES
    }  # fmt: skip
    return found | {
        "nobody chose the last": {"experts": torch.tensor([[2, 0], [2, 1]]), "num_experts": 4, "block": 2},
        "all on two, the higher first": {"experts": torch.tensor([[5, 3]] * 7), "num_experts": 6, "block": 1},
        "all on two, many tokens": {"experts": torch.tensor([[5, 3]] * 90), "num_experts": 6, "block": 16},
        "one token, one expert": {"experts": torch.tensor([[1]]), "num_experts": 2, "block": 1},
    }


CONTRACTS = (
    Contract(
        op=spec.OP, spec=spec, outputs=("rows", "position", "offsets"), cases=cases, limit=lambda _dtype, _output: 0.0,
        tolerance="exactly, filling too", output_dtype=lambda _dtype, _output: torch.int64, dtypes=(torch.int64,),
        parts=lambda found: (found.rows, found.position, found.offsets),
    ),
)  # fmt: skip
