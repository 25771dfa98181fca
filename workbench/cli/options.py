"""Options that several commands share, and the shape of a command: summary, example, one-line errors."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from workbench.cli.outcome import UNUSABLE
from workbench.numerics import LARGEST, PRESETS


class Parser(argparse.ArgumentParser):
    """Errors in one line that begins as all others do."""

    def error(self, message: str):
        self.exit(UNUSABLE, f"workbench: error: {message}; see `{self.prog} --help`\n")


def add_command(
    commands: argparse._SubParsersAction,
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    example: str,
    parents: Sequence[argparse.ArgumentParser] = (),
) -> argparse.ArgumentParser:
    """Add the command `name` with its help and an example; `run` returns its exit code."""
    parser = commands.add_parser(
        name, help=summary, description=summary, epilog=f"example:\n  {example}",
        parents=[shared_options(), *parents], allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.set_defaults(run=run)
    return parser


def shared_options() -> argparse.ArgumentParser:
    """What every command has."""
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return shared


def model_options(*, is_optional: bool = False) -> argparse.ArgumentParser:
    """How a checkpoint is loaded and run; `is_optional` for a command that can do without one."""
    shared = argparse.ArgumentParser(add_help=False)
    group = shared.add_argument_group("model")
    group.add_argument(
        "checkpoint", metavar="CHECKPOINT", type=Path, nargs="?" if is_optional else None,
        help="directory with config.json and safetensors",
    )  # fmt: skip
    group.add_argument(
        "--backend", metavar="[OP=]NAME[:POLICY]", help="backends by name, several separated by commas"
    )
    group.add_argument(
        "--policy", metavar="NAME|FILE", help=f"numerics policy: {', '.join(PRESETS)}, or a JSON file"
    )
    add_bridge(group)
    add_dtype(group)
    group.add_argument(
        "--router-dtype", metavar="DTYPE", choices=ROUTER_DTYPES,
        help=f"dtype of the routers' logits and softmax: {', '.join(ROUTER_DTYPES)}; default: logits in the model's, "
        "softmax in float32 or better",
    )  # fmt: skip
    add_expert_layout(group)
    group.add_argument(
        "--lenient", action="store_true",
        help="repeat a call of an op that failed, and replace a backend that nobody named if it fails again; told on "
        "stderr and in the attestation",
    )  # fmt: skip
    add_card(group)
    group.add_argument("--device", default="cpu", help="cpu (default), cuda or cuda:N")
    return shared


def add_bridge(group: argparse._ActionsContainer) -> None:
    """Bridges to a vendor's symbols, which become backends."""
    group.add_argument(
        "--bridge", metavar="FILE", type=Path, action="append", default=[],
        help="TOML file of bridges to a vendor's symbols (docs/probe.md): built, tried and registered, so that a "
        "backend can be named by them; may be repeated",
    )  # fmt: skip


def add_card(group: argparse._ActionsContainer) -> None:
    """The card to rehearse."""
    group.add_argument(
        "--card", metavar="NAME|FILE", help="rehearse a card's limits: a profile of data/cards (bi-v100, v100, t4, "
        "a100, h200, cpu) or a TOML file; without --dtype weights are read in the dtype that the card runs models in",
    )  # fmt: skip


#: What --router-dtype takes, for help that must not wait for torch.
ROUTER_DTYPES = ("float32", "bfloat16", "float16")


def add_dtype(group: argparse._ActionsContainer) -> None:
    """The dtype that a checkpoint is read in."""
    group.add_argument("--dtype", metavar="DTYPE", help=f"{', '.join(LARGEST)}; default: as stored")


#: Names of the layouts of experts, for help that must not wait for torch.
EXPERT_LAYOUTS = (
    "stacked", "transposed", "per_expert", "w1_w2_w3", "w1_w2_w3_per_expert", "w13_w2", "w13_w2_per_expert",
    "stacked_interleaved", "transposed_interleaved", "w13_w2_interleaved", "w13_w2_per_expert_interleaved",
)  # fmt: skip


def add_expert_layout(group: argparse._ActionsContainer) -> None:
    """How the files hold the experts."""
    group.add_argument(
        "--expert-layout", metavar="LAYOUT", choices=EXPERT_LAYOUTS,
        help="how the files hold experts, where neither their shapes nor their metadata tell: "
        f"{', '.join(EXPERT_LAYOUTS)}",
    )  # fmt: skip


def prompt_options(*, is_optional: bool = False) -> argparse.ArgumentParser:
    """Exactly one source of a prompt; at most one where it `is_optional`."""
    shared = argparse.ArgumentParser(add_help=False)
    prompt = shared.add_argument_group("prompt")
    group = prompt.add_mutually_exclusive_group(required=not is_optional)
    group.add_argument("--prompt", metavar="TEXT")
    group.add_argument("--prompt-file", metavar="FILE", type=Path, help="UTF-8 text")
    group.add_argument("--ids", metavar="1,2,3", help="token ids; needs no tokenizer")
    group.add_argument("--chat", metavar="TEXT", help="a user's message, put into the checkpoint's chat template")
    group.add_argument(
        "--messages", metavar="FILE", type=Path, help="a conversation: JSON list of messages, or one dialogue of "
        "dialogues.jsonl with its tools",
    )  # fmt: skip
    prompt.add_argument("--tools", metavar="FILE", type=Path, help="JSON list of function schemas for the conversation")
    prompt.add_argument(
        "--thinking", choices=("on", "off"), help="of the conversation; default: as the template or the dialogue says"
    )
    return shared
