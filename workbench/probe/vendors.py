"""What vendors' libraries are known to have: names from bring-up notes of the cards, and from vLLM's own ops.

No card of these vendors was at hand. The names of ixformer's functions are those that a vLLM of the vendor calls on its
Python module; the C++ functions behind them were never seen, so that the bridges below are declared for the signatures
that vLLM's own functions of that name have. Another signature is refused and shown. Of the corex libraries no C++
function is known at all: what they export is listed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from workbench.probe.bridges import Bridge
from workbench.probe.vendor_names import check_vendor


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A function to look for: as the Python binding names it, and as C++ symbols may.

    symbols    names that the C++ function may have, the likeliest first; empty where none is known
    word       part of names to list then, for a bridge to be declared from
    op         of ours, which it computes; None where none takes it alone
    instead    the backend of that op that serves without it
    """

    binding: str
    symbols: tuple[str, ...] = ()
    word: str = ""
    op: str | None = None
    instead: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Vendor:
    """A vendor's package.

    modules    Python modules that may have the bindings, the likeliest first
    libraries  words of which the path of a library of it has one
    folders    where its images keep libraries that no path names
    bridges    declarations, one per known signature
    """

    name: str
    modules: tuple[str, ...]
    libraries: tuple[str, ...]
    wanted: tuple[Wanted, ...]
    folders: tuple[str, ...] = ()
    bridges: tuple[Bridge, ...] = field(default=())


_LIKE_VLLM = "csrc/moe/moe_ops.h of vLLM, whose function has this name"

IXFORMER = Vendor(
    name="ixformer",
    modules=("ixformer.functions", "ixformer"),
    libraries=("ixformer",),
    folders=("/opt/apps/ixformer", "/opt/sw_home/local/lib64"),
    wanted=(
        Wanted(binding="vllm_moe_topk_softmax", symbols=("vllm_moe_topk_softmax", "moe_topk_softmax", "topk_softmax"),
               op="routing", instead="torch_sort"),
        Wanted(binding="vllm_moe_align_block_size",
               symbols=("vllm_moe_align_block_size", "moe_align_block_size"), op="alignment", instead="torch_sort"),
        Wanted(binding="vllm_invoke_fused_moe_kernel",
               symbols=("vllm_invoke_fused_moe_kernel", "invoke_fused_moe_kernel"), op="experts",
               instead="torch_sorted"),
        Wanted(binding="matmul", symbols=("ixformer_matmul", "matmul"), op="linear", instead="torch_linear"),
    ),
    bridges=(
        Bridge(
            name="ixformer_bridge", op="routing", symbol="topk_softmax", devices=("cuda",), source=_LIKE_VLLM,
            signature=("at::Tensor&", "at::Tensor&", "at::Tensor&", "at::Tensor&"),
            arguments=("weights", "experts", "token_rows", "logits_float32"),
        ),
        Bridge(
            name="ixformer_bridge", op="routing", symbol="vllm_moe_topk_softmax", devices=("cuda",), source=_LIKE_VLLM,
            signature=("at::Tensor&", "at::Tensor&", "at::Tensor&", "at::Tensor&"),
            arguments=("weights", "experts", "token_rows", "logits_float32"),
        ),
        Bridge(
            name="ixformer_bridge", op="alignment", symbol="moe_align_block_size", devices=("cuda",), source=_LIKE_VLLM,
            signature=("at::Tensor", "long", "long", "at::Tensor", "at::Tensor", "at::Tensor"),
            arguments=("experts", "num_experts", "block", "sorted_pairs", "block_experts", "padded_rows"),
        ),
    ),
)  # fmt: skip


def _corex(name: str, binding: str, word: str, op: str, instead: str) -> Vendor:
    return Vendor(
        name=name, modules=(name,), libraries=(f"lib{name}", f"/{name}"), folders=("/opt/sw_home/local/lib64",),
        wanted=(Wanted(binding=binding, word=word, op=op, instead=instead),),
    )  # fmt: skip


#: What is looked for without being named.
VENDORS = {
    vendor.name: vendor
    for vendor in (
        IXFORMER,
        _corex("corex_gdn", "CoreXGDN", "gdn", "gated_delta_rule", "torch_chunk"),
        _corex("corex_moe", "moe_forward", "moe", "experts", "torch_sorted"),
        _corex("corex_fa2", "fa2_packed_prefill", "fa2", "attention", "torch_sdpa"),
    )
}


def vendor_named(name: str, symbols: tuple[str, ...] = ()) -> Vendor:
    """A known vendor, with `symbols` to look for beside its own; any other name is a package's with these alone.

    Raises InputError as `vendor_names.check_vendor`.
    """
    check_vendor(name, symbols)
    more = tuple(Wanted(binding=symbol.rpartition("::")[2], symbols=(symbol,)) for symbol in symbols)
    if name in VENDORS:
        return replace(VENDORS[name], wanted=(*VENDORS[name].wanted, *more))
    return Vendor(name=name, modules=(name,), libraries=(name.partition(".")[0],), wanted=more)
