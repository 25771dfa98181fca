"""Contract of the routed experts.

    out_t = sum_a weights[t, a] * down[e] (silu(gate[e] x_t) * (up[e] x_t)),   e = experts[t, a]

``run(x, weights, experts, gate_up, down, *, chain) -> out``

x       [tokens, D]
weights [tokens, A]
experts [tokens, A]  int64, each in [0, E), those of a token distinct
gate_up [E, 2I, D]   gate rows first
down    [E, D, I]
out     [tokens, D]  dtype of x. A NaN in the weights of an expert reaches the tokens that chose it; of `torch_dense`,
                     which computes all experts for all tokens, every token
chain   what a backend may ask for, see `Chain`
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.errors import InputError
from workbench.kernels.alignment.spec import Align
from workbench.kernels.registry import Call
from workbench.kernels.workspace import Workspace

OP = "experts"

#: Up to this many tokens small experts are cheaper pair by pair than in segments.
PAIR_TOKENS = 4
#: Up to this many tokens copies of the weights cost a GPU less than sorting the pairs, ...
GPU_GATHERED_TOKENS = 16
#: ... and up to this many, where it has no grouped product, less than a launch for each expert.
GPU_BATCHED_TOKENS = 512
#: From so many values in an expert's first matrix on, oneDNN saves more than its calls cost, for one token too ...
ONEDNN_VALUES = 1 << 20
#: ... and for smaller ones from so many times the number of tokens on.
ONEDNN_MULTIPLIES = 1 << 24


def automatic_order(call: Call) -> tuple[str, ...]:
    few, values = call.tokens <= PAIR_TOKENS, math.prod(call.weight_shape[1:])
    if call.device != "cpu":
        if call.tokens <= GPU_GATHERED_TOKENS:
            return ("torch_gathered", "torch_grouped", "torch_sorted")
        return ("torch_grouped", *(("torch_batched",) if call.tokens <= GPU_BATCHED_TOKENS else ()), "torch_sorted")
    if values >= ONEDNN_VALUES or call.tokens * values >= ONEDNN_MULTIPLIES:
        first = ("torch_onednn",)
    elif few:  # products of half precision want whole batches: torch's matrix times vector takes twice the time
        first = ("torch_gathered",) if call.dtype.itemsize < 4 else ("torch_pairs",)
    else:
        first = ()
    return (*first, "torch_grouped", "torch_sorted")


def check(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor) -> None:
    """Raises InputError, naming the tensor, for shapes, dtypes, devices and expert numbers that do not fit.

    Reads the expert numbers: on a GPU the host waits for them.
    """
    if gate_up.dim() != 3 or gate_up.shape[1] % 2 or not gate_up.numel():
        raise InputError(f"experts: gate_up: expected [E, 2 I, D] of at least 1 each, found {tuple(gate_up.shape)}")
    if not gate_up.is_floating_point() or gate_up.dtype.itemsize == 1:
        raise InputError(f"experts: gate_up: expected floats of 16 bits or more, found {gate_up.dtype}; cast them")
    count, doubled, hidden = gate_up.shape
    tokens, top_k = tuple(experts.shape) if experts.dim() == 2 else (0, 0)
    expected = {
        "x": (x, (tokens, hidden)), "weights": (weights, (tokens, top_k)), "experts": (experts, (tokens, top_k)),
        "down": (down, (count, hidden, doubled // 2)),
    }  # fmt: skip
    for name, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != shape:
            raise InputError(
                f"experts: {name}: expected shape {shape} beside gate_up {tuple(gate_up.shape)} and experts "
                f"{tuple(experts.shape)}, found {tuple(tensor.shape)}"
            )
        if tensor.device != gate_up.device:
            raise InputError(f"experts: {name}: expected device {gate_up.device} as gate_up, found {tensor.device}")
        if name != "experts" and tensor.dtype != gate_up.dtype:
            raise InputError(f"experts: {name}: expected {gate_up.dtype} as gate_up, found {tensor.dtype}; cast one")
    if not top_k:
        raise InputError("experts: experts: expected at least one expert for each token, found none")
    if experts.dtype != torch.int64:
        raise InputError(f"experts: experts: expected int64, found {experts.dtype}")
    outside = ((experts < 0) | (experts >= count)).nonzero()
    if len(outside):
        token, rank = outside[0].tolist()
        raise InputError(
            f"experts: experts: expected numbers from 0 to {count - 1}, found {experts[token, rank].item()} at token "
            f"{token}, rank {rank}, {len(outside)} of {experts.numel()} outside"
        )
    ranked = experts.sort(-1).values
    if bool((ranked[:, 1:] == ranked[:, :-1]).any()):
        token = (ranked[:, 1:] == ranked[:, :-1]).any(-1).nonzero()[0].item()
        raise InputError(f"experts: experts: expected those of a token distinct, found {experts[token].tolist()} at "
                         f"token {token}")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Chain:
    """What the caller gives to a backend.

    align      the op `alignment`, with a backend of its own, for whoever needs its pairs sorted
    workspace  scratch memory that `declare_scratch` declared, None for fresh memory
    """

    align: Align
    workspace: Workspace | None = None


def declare_scratch(
    workspace: Workspace, *, tokens: int, top_k: int, hidden: int, width: int, dtype: torch.dtype
) -> None:
    """Declare what the backends that sort their pairs take for up to `tokens` tokens: [pairs, 2 I] and [pairs, D]."""
    workspace.declare("experts.gate_up", (tokens * top_k, 2 * width), dtype)
    workspace.declare("experts.down", (tokens * top_k, hidden), dtype)


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
