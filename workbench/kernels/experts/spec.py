"""Contract of the routed experts.

    out_t = sum_a weights[t, a] * down[e] (silu(gate[e] x_t) * (up[e] x_t)),   e = experts[t, a]

``run(x, weights, experts, gate_up, down) -> out``

x       [tokens, D]
weights [tokens, A]
experts [tokens, A]  int64
gate_up [E, 2I, D]   gate rows first
down    [E, D, I]
out     [tokens, D]  dtype of x
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.kernels.registry import Call

OP = "experts"

#: Up to this many tokens pairs are cheaper than segments.
PAIR_TOKENS = 4
#: From this many tokens on oneDNN saves more than its padding and its calls cost.
ONEDNN_TOKENS = 512


def automatic_order(call: Call) -> tuple[str, ...]:
    if call.tokens <= PAIR_TOKENS:
        return ("torch_pairs", "torch_gathered", "torch_sorted")
    if call.tokens >= ONEDNN_TOKENS:
        return ("torch_onednn", "torch_sorted", "torch_gathered")
    return ("torch_sorted", "torch_gathered")


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for [..., 2I], gate first -> [..., I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)  # in place: the product takes the place of the activation


def example(
    *, tokens: int = 16, hidden: int = 32, experts: int = 8, top_k: int = 2, width: int = 24,
    dtype: torch.dtype = torch.float32, seed: int = 0,
) -> dict[str, Tensor]:
    """Valid inputs for tests and timings: distinct experts per token, weights that sum to 1."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    scores = torch.rand(tokens, experts, generator=generator)
    weights, chosen = scores.topk(top_k, dim=-1)
    return {
        "x": normal(tokens, hidden),
        "weights": (weights / weights.sum(-1, keepdim=True)).to(dtype),
        "experts": chosen,
        "gate_up": normal(experts, 2 * width, hidden) * hidden**-0.5,
        "down": normal(experts, hidden, width) * width**-0.5,
    }
