"""`workbench score`: how much a checkpoint can still do, or a server that serves it."""

from __future__ import annotations

import argparse
import math
import sys
from typing import TYPE_CHECKING, Any

from workbench.cli.inputs import card_name, folder_of, load_model
from workbench.cli.options import add_command, model_options
from workbench.cli.outcome import FAULT, FINE
from workbench.cli.output import write_json
from workbench.dialogue import Dialogue, DialogueScore, ExpectedCall, fixed_dialogues, fixed_recalls
from workbench.errors import InputError

if TYPE_CHECKING:
    from workbench.quality import DraftAcceptance, Perplexity

#: What is scored, in this order; a server gives text alone, so the last two need the checkpoint.
FIGURES = ("dialogue", "recall", "perplexity", "drafts")
SERVED = FIGURES[:2]


def add(commands) -> None:
    parser = add_command(
        commands, "score", run, "Score replies to fixed dialogues, recall, perplexity and draft acceptance.",
        "workbench score data/miniature --dialogues 200 --minimum dialogue=0.95",
        [model_options(is_optional=True)],
    )  # fmt: skip
    parser.add_argument(
        "--url", metavar="URL", help="ask a chat server (http://host:port) in the place of a checkpoint"
    )
    parser.add_argument("--model", metavar="NAME", help="the server's model; default: the only one it has")
    parser.add_argument("--dialogues", metavar="N", type=int, default=20, help="20 (default) or 200")
    parser.add_argument("--recall", metavar="N", type=int, default=20, help="20 (default) or 100")
    parser.add_argument("--windows", metavar="N|all", type=_windows, default=20,
                        help="held-out windows of 512 tokens for perplexity and drafts (20)")  # fmt: skip
    parser.add_argument("--only", metavar="NAME", action="append", default=[], choices=FIGURES,
                        help=f"one of {', '.join(FIGURES)}; may be given several times; default: all")  # fmt: skip
    parser.add_argument("--minimum", metavar="NAME=SHARE", action="append", default=[],
                        help="end with 1 where dialogue, recall or drafts are below this share")  # fmt: skip
    parser.add_argument("--show-wrong", action="store_true", help="print every reply that is not right")
    parser.add_argument("--json", metavar="FILE|-", help="write all figures and replies as JSON")


def run(options: argparse.Namespace) -> int:
    if (options.checkpoint is None) == (options.url is None):
        raise InputError("score: expected either a CHECKPOINT or --url, found " + ("both" if options.url else "none"))
    possible = FIGURES if options.url is None else SERVED
    if impossible := [name for name in options.only if name not in possible]:
        raise InputError(
            f"--only {impossible[0]}: expected one of {', '.join(possible)} with --url: it gives text alone"
        )
    wanted = [name for name in possible if name in options.only or not options.only]
    minimum = _minimum(options.minimum, wanted)
    asked: dict[str, list[Dialogue]] = {}
    if "dialogue" in wanted:
        asked["dialogue"] = fixed_dialogues(options.dialogues)
    if "recall" in wanted:
        asked["recall"] = fixed_recalls(options.recall)
    found, about = (_of_checkpoint if options.url is None else _of_server)(options, asked, wanted)
    below = {name: value for name, value in minimum.items() if not _share(found[name]) >= value}
    if options.json is not None:
        write_json({**about, "scores": {name: figure.to_json() for name, figure in found.items()},
                    "minimum": minimum, "below": sorted(below)}, options.json)  # fmt: skip
    if options.json != "-":
        lines = [_line(name, figure) for name, figure in found.items()]
        if options.show_wrong:
            lines += [line for name, part in asked.items() for line in _wrong_lines(part, found[name])]
        lines += [
            f"{name}: expected at least {value:g}, found {_share(found[name]):.4g}" for name, value in below.items()
        ]
        print("\n".join(lines))
    return FAULT if below else FINE


def _of_checkpoint(
    options: argparse.Namespace, asked: dict[str, list[Dialogue]], wanted: list[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    from workbench import quality
    from workbench.tokenizer import Tokenizer

    if options.model is not None:
        raise InputError("--model: expected only with --url, found it with a checkpoint")
    model = load_model(options)
    tokenizer = Tokenizer.from_directory(folder_of(options.checkpoint))
    found: dict[str, Any] = {}
    for name, dialogues in asked.items():
        found[name] = quality.dialogue_score(model, tokenizer, dialogues, progress=_progress(name))
    if {"perplexity", "drafts"} & set(wanted):
        tokens = quality.heldout_tokens(tokenizer, windows=options.windows)
    if "perplexity" in wanted:
        found["perplexity"] = quality.perplexity(model, tokens, tokenizer=tokenizer)
    # A model may lack the head; only where the figure was asked for by name is that an error.
    is_named = "drafts" in options.only or any(setting.startswith("drafts") for setting in options.minimum)
    if "drafts" in wanted and (is_named or model.config.mtp_num_hidden_layers):
        found["drafts"] = quality.draft_acceptance(model, tokens)
    backends = [row.to_json() for row in model.kernels.attestation()]
    about = {
        "checkpoint": str(options.checkpoint), "dtype": str(model.dtype).removeprefix("torch."),
        "policy": model.kernels.policy.to_json(), "backends": backends,
        "card": card_name(model),
    }  # fmt: skip
    return found, about


def _of_server(
    options: argparse.Namespace, asked: dict[str, list[Dialogue]], wanted: list[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    from workbench.serving.chat import ChatServer, served_score

    for name in ("backend", "policy", "dtype", "router-dtype", "expert-layout", "card", "lenient", "bridge"):
        if getattr(options, name.replace("-", "_")) not in (None, False, []):
            raise InputError(f"--{name}: expected only with a checkpoint, found it with --url; the server has its own")
    if options.device != "cpu":  # its default
        raise InputError("--device: expected only with a checkpoint, found it with --url; the server has its own")
    server = ChatServer(options.url)
    found = {
        name: served_score(server, dialogues, model=options.model, progress=_progress(name))
        for name, dialogues in asked.items()
    }
    return found, {"url": options.url, "model": options.model}


def _windows(text: str) -> int | None:
    """The number of windows, None for all of the text."""
    if text == "all":
        return None
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, or all, found {text!r}")
    return int(text)


def _progress(name: str):
    return lambda line: print(f"{name}: {line}", file=sys.stderr, flush=True)


def _minimum(settings: list[str], wanted: list[str]) -> dict[str, float]:
    found = {}
    for setting in settings:
        name, _, text = setting.partition("=")
        if name not in wanted or name == "perplexity":
            shares = [known for known in wanted if known != "perplexity"]
            raise InputError(
                f"--minimum {setting}: expected NAME=SHARE with a name of {', '.join(shares) or 'none here'}, "
                f"found {name!r}"
            )
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0.0 <= value <= 1.0:
            raise InputError(f"--minimum {setting}: expected a share from 0 to 1, found {text!r}")
        found[name] = value
    return found


def _share(figure: DialogueScore | DraftAcceptance) -> float:
    return figure.share if isinstance(figure, DialogueScore) else figure.rate


def _line(name: str, figure: DialogueScore | Perplexity | DraftAcceptance) -> str:
    if isinstance(figure, DialogueScore):
        kinds = ", ".join(f"{kind} {right}/{asked}" for kind, (right, asked) in figure.by_kind.items())
        modes = ", ".join(
            f"{'on' if on else 'off'} {right}/{asked}" for on, (right, asked) in figure.by_thinking.items()
        )
        bad = sum(not outcome.is_finite for outcome in figure.replies)
        note = f"; {bad} with logits that are not finite" if bad else ""
        return f"{name:<11}{figure.share:>8.1%}  {figure.right} of {figure.asked}: {kinds}; thinking {modes}{note}"
    if name == "perplexity":
        return (
            f"{name:<11}{figure.perplexity:>8.2f}  over {figure.predicted:,} tokens; "
            f"{figure.nats_per_byte:.4f} nats a byte of text"
        )
    return f"{name:<11}{figure.rate:>8.1%}  {figure.accepted:,} of {figure.proposed:,} drafts"


def _wrong_lines(dialogues: list[Dialogue], score: DialogueScore) -> list[str]:
    lines = []
    for dialogue, outcome in zip(dialogues, score.replies, strict=True):
        if outcome.right:
            continue
        expected = dialogue.expected
        is_call = isinstance(expected, ExpectedCall)
        text = f"{expected.name}({expected.arguments})" if is_call else expected.text
        lines += [
            f"{outcome.id}, thinking {'on' if outcome.thinking else 'off'}: {outcome.problem or 'another reply'}",
            f"  expected  {text!r}",
            f"  found     {outcome.text!r}",
        ]
    return lines
