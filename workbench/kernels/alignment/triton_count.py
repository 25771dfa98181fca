"""A counting sort in two Triton kernels: the pairs of each part are counted, then put in their places. No host sync.

A row is the first of its expert, plus the pairs on the expert in earlier parts, plus those before it in its own part,
found by sorting the part: integers without atomics, the same layout every time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.kernels import triton_runs
from workbench.kernels.alignment.spec import Alignment, most_rows
from workbench.kernels.registry import Call
from workbench.kernels.requirements import Requires

REQUIRES = Requires(devices=("cuda", "cpu"), capability=(8, 0), symbols=("triton:jit",))

#: Pairs of one program by the number of all pairs, at least: a program sorts its part, and reads the counts of all.
PARTS = ((1 << 16, 1024), (1 << 13, 512), (0, 256))
#: Values of counts that a program reads at a time.
READ = 8192


def supports(call: Call) -> str | None:
    return triton_runs.refusal(call)


def run(experts: Tensor, *, num_experts: int, block: int) -> Alignment:
    """See `spec`."""
    from triton import cdiv, next_power_of_2

    from workbench.kernels.alignment.triton_count_kernels import count_kernel, place_kernel

    pairs, device = experts.numel(), experts.device
    experts = experts.contiguous()
    count = most_rows(pairs, num_experts, block)
    if not pairs:
        offsets = torch.zeros(num_experts + 1, dtype=torch.int64, device=device)
        return Alignment(offsets[:0], torch.empty_like(experts), offsets, block)
    rows = torch.empty(count, dtype=torch.int64, device=device)
    position, offsets = torch.empty_like(experts), rows.new_empty(num_experts + 1)
    part = next(size for least, size in PARTS if pairs >= least)
    parts, padded = cdiv(pairs, part), max(16, next_power_of_2(num_experts))
    counts = torch.empty(parts, num_experts, dtype=torch.int32, device=device)
    fill = next_power_of_2(cdiv(count, parts)) if block > 1 else 0
    count_kernel[(parts,)](experts, counts, rows, pairs, count, E=num_experts, PADDED_E=padded, PART=part, FILL=fill)
    place_kernel[(parts,)](
        experts, counts, rows, position, offsets, pairs, parts, block,
        E=num_experts, PADDED_E=padded, PART=part, LINES=max(1, READ // padded), num_warps=8,
    )  # fmt: skip
    return Alignment(rows, position, offsets, block)
