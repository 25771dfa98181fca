"""What vendors' libraries are known to have: names from bring-up notes of the cards, and from vLLM's own ops.

No card of these vendors was at hand. The names of ixformer's functions are those that a vLLM of the vendor calls on its
Python module; the C++ functions behind them were never seen, so that the bridges below are declared for the signatures
that vLLM's own functions of that name have. Another signature is refused and shown.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from workbench.errors import InputError
from workbench.probe.bridges import Bridge


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A function to look for: as the Python binding names it, and as C++ symbols may.

    op         of ours, which it computes; None where none takes it alone
    instead    the backend of that op that serves without it
    """

    binding: str
    symbols: tuple[str, ...]
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


def _corex(name: str, symbols: tuple[str, ...], op: str, instead: str, binding: str) -> Vendor:
    return Vendor(
        name=name, modules=(name, f"vllm.{name}"), libraries=(f"lib{name}", f"/{name}"),
        folders=("/opt/sw_home/local/lib64",),
        wanted=(Wanted(binding=binding, symbols=symbols, op=op, instead=instead),),
    )  # fmt: skip


#: What is looked for without being named.
VENDORS = {
    vendor.name: vendor
    for vendor in (
        IXFORMER,
        _corex("corex_gdn", ("gdn_prefill", "gdn_decode", "gdn_forward"), "gated_delta_rule", "torch_chunk",
               "CoreXGDN"),
        _corex("corex_moe", ("moe_forward", "fused_moe"), "experts", "torch_sorted", "moe_forward"),
        _corex("corex_fa2", ("flash_attn_fwd", "fa2_forward"), "attention", "torch_sdpa", "flash_attn_func"),
    )
}


def vendor_named(name: str, symbols: tuple[str, ...] = ()) -> Vendor:
    """A known vendor, with `symbols` to look for beside its own; any other name is a package's with these alone.

    Raises InputError for what is no name of a package, and for one that nothing is known of without `symbols`.
    """
    more = tuple(Wanted(binding=symbol.rpartition("::")[2], symbols=(symbol,)) for symbol in symbols)
    if name in VENDORS:
        known = VENDORS[name]
        return Vendor(name=name, modules=known.modules, libraries=known.libraries, wanted=(*known.wanted, *more),
                      folders=known.folders, bridges=known.bridges)  # fmt: skip
    if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", name):
        raise InputError(f"--vendor {name!r}: expected one of {', '.join(VENDORS)}, or the name of a Python package")
    if not symbols:
        raise InputError(
            f"--vendor {name}: expected one of {', '.join(VENDORS)}; of another package name the functions to look for "
            "with --symbol"
        )
    return Vendor(name=name, modules=(name,), libraries=(name.partition(".")[0],), wanted=more)
