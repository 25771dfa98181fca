"""`workbench inspect`: what a checkpoint holds, tensor by tensor and byte by byte."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.cli.options import add_card, add_command, add_dtype, add_expert_layout
from workbench.cli.outcome import FAULT, FINE
from workbench.cli.output import text_table, write_json
from workbench.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

    from workbench.analysis.memory_plan import MemoryPlan
    from workbench.cards import Card
    from workbench.checkpoint import Checkpoint
    from workbench.config import ModelConfig


def add(commands) -> None:
    parser = add_command(
        commands, "inspect", run, "Show a checkpoint's configuration, parameters and tensors.",
        "workbench inspect data/miniature --dtype float16",
    )  # fmt: skip
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", type=Path, help="directory with config.json and safetensors"
    )
    add_dtype(parser)
    add_expert_layout(parser)
    add_card(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    from workbench.analysis.inventory import parameter_groups
    from workbench.analysis.memory_plan import memory_plan, weights_in_files
    from workbench.cards import card_named
    from workbench.checkpoint import read_checkpoint
    from workbench.loading import dtype_named

    if not options.checkpoint.exists():
        raise InputError(f"checkpoint {options.checkpoint}: expected a directory, found nothing there")
    card = None if options.card is None else card_named(options.card)
    dtype = card.model_dtype if options.dtype is None and card is not None else options.dtype
    checkpoint = read_checkpoint(options.checkpoint, dtype=dtype_named(dtype), expert_layout=options.expert_layout)
    plan = None
    if card is not None:
        _, held = weights_in_files(options.checkpoint, dtype, expert_layout=options.expert_layout)
        plan = memory_plan(checkpoint.config, card, dtype=dtype, weights=held)
    groups = parameter_groups(checkpoint.tensors)
    narrowing = checkpoint.accounting.narrowing_frame()
    changed = narrowing[(narrowing["n_overflow"] > 0) | (narrowing["n_flushed"] > 0)]
    overflows = int(narrowing["n_overflow"].sum())
    if options.json:
        accounting = checkpoint.accounting
        content = {
            "config": checkpoint.config.to_hf(),
            "expert_layouts": dict(checkpoint.accounting.expert_layouts),
            "groups": groups.to_dict("records"),
            "accounting": {
                "totals": {
                    kind: {"tensors": n, "bytes": size} for kind, (n, size) in accounting.totals.items()
                },
                "file_bytes": accounting.file_bytes,
                "header_bytes": accounting.header_bytes,
                "notes": list(accounting.notes),
                "tensors": accounting.to_frame().astype(object).to_dict("records"),
            },
            "narrowing": changed.astype(object).to_dict("records"),
        }
        if plan is not None:
            content |= {"card": card.name, "dtype": dtype, "memory": plan.to_json()}
        write_json(content, "-")
    else:
        print(_text(checkpoint, groups, narrowing, changed, dtype))
        if plan is not None:
            print("\n".join(["", *_plan_lines(card, plan)]))
    return FAULT if overflows or (plan is not None and plan.fits is False) else FINE


def _text(
    checkpoint: Checkpoint,
    groups: pd.DataFrame,
    narrowing: pd.DataFrame,
    changed: pd.DataFrame,
    dtype: str | None,
) -> str:
    import pandas as pd

    lines = [*_config_lines(checkpoint.config), *_layout_lines(checkpoint), ""]
    totals = {
        "group": "sum",
        "dtype": "",
        **{name: groups[name].sum() for name in ("tensors", "parameters", "bytes")},
    }
    counts = dict.fromkeys(("tensors", "parameters", "bytes"), ",")
    lines += [text_table(pd.concat([groups, pd.DataFrame([totals])], ignore_index=True), counts), ""]
    lines += [checkpoint.accounting.summary()]
    if dtype is not None and narrowing.empty:
        lines += ["", f"narrowing to {dtype}: no tensor can change its values by it"]
    elif dtype is not None:
        lines += [
            "",
            f"narrowing to {dtype}: of {narrowing['numel'].sum():,} values in {len(narrowing)} tensors "
            f"{narrowing['n_overflow'].sum():,} overflow and {narrowing['n_flushed'].sum():,} become zero",
        ]
        if len(changed):
            lines.append(text_table(changed))
    return "\n".join(lines)


def _plan_lines(card: Card, plan: MemoryPlan) -> list[str]:
    """What of it fits the card, and whether the card multiplies the dtype."""
    from workbench.analysis.wording import size_text
    from workbench.cards.profile import MATMUL

    rule = card.rule(MATMUL, plan.dtype)
    if rule is not None and rule.outcome != "run":
        outcome = "routed" if rule.outcome == "route" else "cast"
        products = f"products in {plan.dtype}: {outcome} to {rule.to} ({rule.why})"
    elif rule is not None or plan.dtype in card.native_matmul:
        products = f"products in {plan.dtype}: run there"
    else:
        products = f"products in {plan.dtype}: none, the card has neither arithmetic nor a rule for them"
    lines = [f"{card.title}, rehearsed", f"  {products}", f"  {plan.in_words()}"]
    if plan.fits is False:
        lines.append(f"  does not fit: a sequence of {plan.length:,} tokens needs {size_text(plan.needed)}; "
                     "`workbench rehearse --plan-only --length N` plans for others")  # fmt: skip
    return lines


def _layout_lines(checkpoint: Checkpoint) -> list[str]:
    """How the files hold experts: one line for each layout found."""
    from workbench.checkpoint.read import summarise_names

    blocks: dict[str, list[str]] = {}
    for block, layout in checkpoint.accounting.expert_layouts:
        blocks.setdefault(layout, []).append(block)
    return [f"expert layout: {layout} ({summarise_names(names)})" for layout, names in blocks.items()]


def _config_lines(config: ModelConfig) -> list[str]:
    linear = config.layer_types.count("linear_attention")
    full = len(config.layer_types) - linear
    lines = [
        f"{config.family}: {config.num_hidden_layers} layers ({linear} linear, {full} full attention), "
        f"hidden {config.hidden_size}, vocabulary {config.vocab_size:,}"
        + (", tied embeddings" if config.tie_word_embeddings else ""),
        f"gated delta net: {config.linear_num_key_heads} key heads of {config.linear_key_head_dim}, "
        f"{config.linear_num_value_heads} value heads of {config.linear_value_head_dim}, "
        f"convolution {config.linear_conv_kernel_dim}",
        f"attention: {config.num_attention_heads} heads of {config.head_dim}, {config.num_key_value_heads} "
        f"key-value heads, rotary {config.rotary_dim} of {config.head_dim} channels, "
        f"theta {config.rope_theta:g}",
    ]
    if config.is_moe:
        lines.append(
            f"experts: {config.num_experts} of width {config.moe_intermediate_size}, "
            f"{config.num_experts_per_tok} per token, shared expert of width "
            f"{config.shared_expert_intermediate_size}"
        )
    lines.append(f"multi-token prediction: {'one layer' if config.mtp_num_hidden_layers else 'none'}")
    return lines
