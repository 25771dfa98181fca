"""Grouped products in Triton over the pairs sorted by expert, for many tokens: SwiGLU in the epilogue of the first,
then a weighted sum over the experts of each token.

Every tile of rows belongs to one expert, so all experts are two launches. The first product gathers the rows of its
tokens while it runs, so no sorted copy of the inputs is made; the second writes the row of each pair, and a third
kernel adds those of a token in rank order: no atomics, the same result every time. Matrices are read, and whole tiles
written, by hardware copies (tensor descriptors, compute capability 9.0 and newer) where rows are whole multiples of
16 bytes, by pointers elsewhere. No host sync.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench import taps
from workbench.kernels import triton_runs
from workbench.kernels.experts.spec import Chain
from workbench.kernels.layout import row_major
from workbench.kernels.registry import Call

REQUIRES = triton_runs.REQUIRES
FLAGS = (taps.MOE_EXPERTS,)

#: A tensor descriptor needs rows and a start of whole multiples of this many bytes.
ALIGNED_BYTES = 16


def supports(call: Call) -> str | None:
    return triton_runs.refusal(call)


def has_descriptors(*matrices: Tensor) -> bool:
    """Whether whole tiles of these matrices can be moved by hardware copies; what is not row-major will be copied."""
    return triton_runs.has_copy_engine(matrices[0].device) and all(
        x.shape[-1] * x.element_size() % ALIGNED_BYTES == 0
        and (not x.is_contiguous() or x.data_ptr() % ALIGNED_BYTES == 0)
        for x in matrices
    )


def path(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, *, chain: Chain,
    flags: Tensor | None = None,
) -> str:  # fmt: skip
    """How many rows a tile has, and how weights are read, for the attestation."""
    if not x.shape[0]:
        return "no tokens"
    from workbench.kernels.experts.triton_grouped_kernels import settings

    by_descriptor = has_descriptors(gate_up, down)
    rows = settings(experts.numel() / gate_up.shape[0], x.dtype, by_descriptor).rows
    return f"tiles of {rows} rows, weights by {'tensor descriptors' if by_descriptor else 'pointers'}"


def run(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, *, chain: Chain,
    flags: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See `spec`. `flags` int32 [1, 2]: words of `taps.MOE_EXPERTS`."""
    if not x.shape[0]:
        return torch.zeros_like(x)
    if chain.workspace is None:
        pairs, hidden = experts.numel(), gate_up.shape[1] // 2
        return _launch(
            x, weights, experts, gate_up, down, chain, flags,
            x.new_empty(pairs, hidden), x.new_empty(pairs, x.shape[1]),
        )  # fmt: skip
    with (
        chain.workspace.take("experts.gate_up", (experts.numel(), gate_up.shape[1] // 2), x.dtype) as hidden,
        chain.workspace.take("experts.down", (experts.numel(), x.shape[1]), x.dtype) as of_rows,
    ):
        return _launch(x, weights, experts, gate_up, down, chain, flags, hidden, of_rows)


def _launch(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, chain: Chain, flags: Tensor | None,
    hidden: Tensor, of_rows: Tensor,
) -> Tensor:  # fmt: skip
    """hidden [P, I] and of_rows [P, D] are scratch."""
    from triton import cdiv, next_power_of_2
    from triton.tools.tensor_descriptor import TensorDescriptor

    from workbench.kernels.experts import triton_grouped_kernels as kernels

    count, width, top_k = gate_up.shape[0], down.shape[2], experts.shape[1]
    tokens, features = x.shape
    x, gate_up, down = row_major(x), row_major(gate_up), row_major(down)
    by_descriptor = has_descriptors(gate_up, down, hidden, of_rows)
    settings = kernels.settings(experts.numel() / count, x.dtype, by_descriptor)
    plan = chain.align(experts, count, 1)

    most = experts.numel() // settings.rows + min(count, experts.numel())
    tiles = torch.empty(most, 4, dtype=torch.int32, device=x.device)
    used = torch.empty(1, dtype=torch.int32, device=x.device)
    kernels.tile_table_kernel[(count,)](
        plan.offsets, tiles, used, E=count, ROWS=settings.rows, PADDED_E=next_power_of_2(count)
    )

    def launch(product: kernels.Product, columns: int) -> tuple[tuple[int], dict[str, int | bool]]:
        """The number of programs and the constants of a product."""
        return (most * cdiv(columns, product.columns),), {
            "D": features, "WIDTH": width, "ROWS": settings.rows, "TAIL": product.tail, "COLUMNS": product.columns,
            "DEPTH": product.depth, "BY_DESCRIPTOR": by_descriptor, "num_warps": product.warps,
            "num_stages": product.stages,
        }  # fmt: skip

    first, second = settings.gate_up, settings.down
    of_gate_up, of_down, of_hidden, of_tail, whole = gate_up, down, hidden, hidden, of_rows
    if by_descriptor:
        of_gate_up = TensorDescriptor.from_tensor(
            gate_up.view(count, 2, width, features), [1, 2, first.columns, first.depth]
        )
        of_down = TensorDescriptor.from_tensor(down.view(count * features, width), [second.columns, second.depth])
        of_hidden = TensorDescriptor.from_tensor(hidden, [settings.rows, second.depth])
        of_tail = TensorDescriptor.from_tensor(hidden, [second.tail or settings.rows, second.depth])
        whole = TensorDescriptor.from_tensor(of_rows, [settings.rows, second.columns])
    programs, constants = launch(first, width)
    kernels.gate_up_kernel[programs](x, plan.rows, tiles, used, of_gate_up, hidden, A=top_k, **constants)
    programs, constants = launch(second, features)
    kernels.down_kernel[programs](of_hidden, of_tail, tiles, used, of_down, of_rows, whole, **constants)
    out = torch.empty_like(x)
    columns = min(kernels.SUM_COLUMNS, next_power_of_2(features))
    kernels.sum_kernel[(tokens, cdiv(features, columns))](
        of_rows, plan.position, row_major(weights), out, flags, D=features, A=top_k, COLUMNS=columns,
        num_warps=kernels.SUM_WARPS,
    )  # fmt: skip
    return out
