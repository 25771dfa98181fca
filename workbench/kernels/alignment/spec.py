"""Contract of the alignment: token-expert pairs laid out expert after expert, in whole blocks of rows.

``run(experts, *, num_experts, block) -> Alignment``

experts [tokens, A]  int64, each in [0, E), those of a token distinct

Pair p = token * A + rank. The rows of an expert are its pairs in the order of the tokens, then filled up to a multiple
of `block`; block 1 fills up nothing. The number of rows R is a bound that depends on shapes alone, so that nothing has
to be read back: from `offsets[E]` on all rows are filling. It is what vLLM calls moe_align_block_size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.kernels.registry import Call

OP = "alignment"

#: From this many tokens on counting is cheaper than sorting, while the table of hits [E, tokens] is small.
COUNT_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Alignment:
    """Where each pair stands.

    rows     [R]          int64, the pair of each row; tokens * A where a row is filling
    position [tokens, A]  int64, the row of each pair
    offsets  [E + 1]      int64, the first row of each expert, and the end of the last one
    block    rows per block
    """

    rows: Tensor
    position: Tensor
    offsets: Tensor
    block: int

    def tokens_of_rows(self) -> Tensor:
        """[R] the token of each row, token 0 where it is filling: rows that are computed and read by nobody."""
        tokens, top_k = self.position.shape
        return (self.rows // top_k).masked_fill_(self.rows == tokens * top_k, 0)

    def experts_of_blocks(self) -> Tensor:
        """[R / block] the expert of each block, E - 1 for those that are filling as a whole."""
        starts = torch.arange(0, self.rows.shape[0], self.block, device=self.rows.device)
        return torch.searchsorted(self.offsets[1:-1], starts, right=True)


#: (experts, num_experts, block) -> Alignment: how a backend of the experts asks for one.
Align = Callable[[Tensor, int, int], Alignment]


def most_rows(pairs: int, num_experts: int, block: int) -> int:
    """R: each expert that is hit, of at most min(E, pairs), leaves at most block - 1 rows unused."""
    return (pairs + min(num_experts, pairs) * (block - 1)) // block * block


def automatic_order(call: Call) -> tuple[str, ...]:
    return ("torch_count", "torch_sort") if call.tokens >= COUNT_TOKENS else ("torch_sort", "torch_count")
