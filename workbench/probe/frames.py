"""Ops that a bridge can compute: the values that a foreign function may be given, and what becomes of its results.

Each frame has TENSORS and NUMBERS, the names that a bridge's arguments may use, `runner`, which gives the op with the
signature of its contract, `sample`, inputs to try it on, and `compare`, which holds a result to the reference's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from workbench.errors import BackendError
from workbench.kernels.alignment.spec import Alignment, most_rows
from workbench.probe.steps import Failed

#: A foreign function filled in with all values of a frame, on a device.
Foreign = Callable[[Mapping[str, Any], torch.device], None]
#: Roundings of the result's dtype that a result may be off by, relative, as norms.
ROUNDINGS = 8


class Linear:
    """y = x weight^T.

    x [rows, features], weight [outputs, features], weight_t [features, outputs] (a view, for references alone),
    y [rows, outputs] to be filled, in the dtype of x.
    """

    TENSORS = ("x", "weight", "weight_t", "y")
    NUMBERS = ("rows", "features", "outputs")

    @staticmethod
    def runner(foreign: Foreign, dtypes: Mapping[str, torch.dtype]) -> Callable[..., Tensor]:
        def run(x: Tensor, weight: Tensor) -> Tensor:
            flat, weight = x.reshape(-1, x.shape[-1]).contiguous(), weight.contiguous()
            y = flat.new_empty(flat.shape[0], weight.shape[0], dtype=dtypes.get("y", x.dtype))
            foreign({"x": flat, "weight": weight, "weight_t": weight.t(), "y": y, "rows": flat.shape[0],
                     "features": flat.shape[1], "outputs": weight.shape[0]}, x.device)  # fmt: skip
            return y.to(x.dtype).view(*x.shape[:-1], weight.shape[0])

        return run

    @staticmethod
    def sample(device: torch.device, dtype: torch.dtype) -> tuple[tuple, dict[str, Any]]:
        seed = torch.Generator().manual_seed(0)
        x, weight = torch.randn(2, 8, 64, generator=seed), torch.randn(32, 64, generator=seed)
        return (x.to(device, dtype), weight.to(device, dtype)), {}

    @staticmethod
    def compare(found: Tensor, expected: Tensor) -> str:
        return _close("y", found, expected)


class Routing:
    """softmax over all experts and the best top_k.

    logits [tokens, num_experts] as given, logits_float32 the same in float32 (exact); to be filled, [tokens, top_k]:
    weights float32, experts int32 and token_rows int32 (scratch of vLLM's form), or in the dtypes that pointers ask
    for. The weights are divided by their sum afterwards where the op asks for it.
    """

    TENSORS = ("logits", "logits_float32", "weights", "experts", "token_rows")
    NUMBERS = ("tokens", "num_experts", "top_k", "normalise")

    @staticmethod
    def runner(foreign: Foreign, dtypes: Mapping[str, torch.dtype]) -> Callable[..., tuple[Tensor, Tensor]]:
        def run(
            logits: Tensor, *, top_k: int, normalise: bool, dtype: torch.dtype | None = None
        ) -> tuple[Tensor, Tensor]:
            if dtype not in (None, torch.float32):
                raise BackendError(f"op routing: a bridge takes the softmax in float32, asked for was {dtype}; leave "
                                   "out --router-dtype or name another backend")  # fmt: skip
            logits = logits.contiguous()
            shape = (logits.shape[0], top_k)
            weights = logits.new_empty(shape, dtype=dtypes.get("weights", torch.float32))
            experts, rows = (
                logits.new_empty(shape, dtype=dtypes.get(name, torch.int32)) for name in ("experts", "token_rows")
            )
            foreign({"logits": logits, "logits_float32": logits.float(), "weights": weights, "experts": experts,
                     "token_rows": rows, "tokens": shape[0], "num_experts": logits.shape[1], "top_k": top_k,
                     "normalise": int(normalise)}, logits.device)  # fmt: skip
            if normalise:
                weights = weights / weights.sum(-1, keepdim=True)
            return weights.to(logits.dtype), experts.long()

        return run

    @staticmethod
    def sample(device: torch.device, dtype: torch.dtype) -> tuple[tuple, dict[str, Any]]:
        seed = torch.Generator().manual_seed(0)
        # Halves of whole numbers: exact in every dtype, and without ties.
        order = torch.stack([torch.randperm(64, generator=seed) for _ in range(8)])
        return ((order / 8 - 4).to(device, dtype),), {"top_k": 4, "normalise": True}

    @staticmethod
    def compare(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> str:
        _same("experts", found[1], expected[1])
        return _close("weights", found[0], expected[0])


class AlignedPairs:
    """Token-expert pairs laid out expert after expert, in blocks of `block` rows: vLLM's moe_align_block_size.

    experts [tokens, top_k] int32 (or as a pointer asks); to be filled, int32: sorted_pairs [pairs + num_experts *
    (block - 1)], which begins as all `pairs`, the sign of an unused row, block_experts [its blocks], padded_rows [1].
    """

    TENSORS = ("experts", "sorted_pairs", "block_experts", "padded_rows")
    NUMBERS = ("tokens", "top_k", "pairs", "num_experts", "block")

    @staticmethod
    def runner(foreign: Foreign, dtypes: Mapping[str, torch.dtype]) -> Callable[..., Alignment]:
        def run(experts: Tensor, *, num_experts: int, block: int) -> Alignment:
            pairs, device = experts.numel(), experts.device
            given = experts.to(dtypes.get("experts", torch.int32)).contiguous()
            rows = pairs + num_experts * (block - 1)
            sorted_pairs = torch.full((rows,), pairs, dtype=dtypes.get("sorted_pairs", torch.int32), device=device)
            blocks, padded = (
                torch.zeros(size, dtype=dtypes.get(name, torch.int32), device=device)
                for name, size in (("block_experts", -(-rows // block)), ("padded_rows", 1))
            )
            foreign({"experts": given, "sorted_pairs": sorted_pairs, "block_experts": blocks, "padded_rows": padded,
                     "tokens": experts.shape[0], "top_k": experts.shape[1], "pairs": pairs, "num_experts": num_experts,
                     "block": block}, device)  # fmt: skip
            laid = sorted_pairs[: most_rows(pairs, num_experts, block)].long()
            counts = torch.zeros(num_experts, dtype=torch.int64, device=device)
            counts.scatter_add_(0, experts.reshape(-1), torch.ones_like(experts.reshape(-1)))
            offsets = torch.zeros(num_experts + 1, dtype=torch.int64, device=device)
            torch.cumsum((counts + block - 1) // block * block, 0, out=offsets[1:])
            position = torch.zeros(pairs + 1, dtype=torch.int64, device=device)  # the last one takes all unused rows
            position.scatter_(0, laid, torch.arange(laid.shape[0], device=device))
            return Alignment(laid, position[:pairs].view_as(experts), offsets, block)

        return run

    @staticmethod
    def sample(device: torch.device, dtype: torch.dtype) -> tuple[tuple, dict[str, Any]]:
        seed = torch.Generator().manual_seed(0)
        experts = torch.stack([torch.randperm(8, generator=seed)[:2] for _ in range(16)])
        return (experts.to(device),), {"num_experts": 8, "block": 4}

    @staticmethod
    def compare(found: Alignment, expected: Alignment) -> str:
        for name in ("offsets", "position"):
            _same(name, getattr(found, name), getattr(expected, name))
        used = int(expected.offsets[-1])
        return _same("rows", found.rows[:used], expected.rows[:used])


FRAMES = {"linear": Linear, "routing": Routing, "alignment": AlignedPairs}


def _close(name: str, found: Tensor, expected: Tensor) -> str:
    """The relative error; raises Failed where it is more than ROUNDINGS of the dtype."""
    if found.shape != expected.shape:
        raise Failed(f"{name}: expected shape {tuple(expected.shape)}, found {tuple(found.shape)}", *WRONG)
    wide = expected.double()
    error = float((found.double() - wide).norm() / wide.norm())
    limit = ROUNDINGS * torch.finfo(found.dtype).eps
    if not error <= limit:  # a NaN is a fault too
        first = found.flatten()[:4].tolist(), expected.flatten()[:4].tolist()
        raise Failed(f"{name}: relative error {error:.3g} against the reference, at most {limit:.3g} expected; it "
                     f"begins with {first[0]}, expected {first[1]}", *WRONG)  # fmt: skip
    return f"{name} right, relative error {error:.2g} of at most {limit:.2g}"


def _same(name: str, found: Tensor, expected: Tensor) -> str:
    if found.shape != expected.shape or not torch.equal(found.cpu(), expected.cpu()):
        raise Failed(f"{name}: expected {expected.flatten()[:8].tolist()}..., found {found.flatten()[:8].tolist()}...",
                     *WRONG)  # fmt: skip
    return f"{name} right"


#: Next step and cause of a wrong result.
WRONG = (
    "compare the order of the arguments and the result's type with the vendor's header; correct the declaration",
    "wrong_result",
)
