"""`workbench routing`: which experts serve which tokens, and where two runs of the same tokens choose otherwise."""

from __future__ import annotations

import argparse
import copy
import functools
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.cli.inputs import card_name, folder_of, load_model
from workbench.cli.options import ROUTER_DTYPES, add_command, model_options
from workbench.cli.outcome import FAULT, FINE
from workbench.cli.output import text_table, write_json
from workbench.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

    from workbench.analysis.routing import RoutingFlips, RoutingPrompt, RoutingRecord

#: Options of the second run: name on the command line -> attribute of the options that it replaces.
AGAINST = {
    "against_dtype": "dtype", "against_policy": "policy", "against_backend": "backend",
    "against_router_dtype": "router_dtype",
}  # fmt: skip

#: Progress is shown from so many seconds on, and every so many seconds.
PATIENCE, INTERVAL = 2.0, 5.0

#: Pairs of experts of each layer in the JSON, and the tokens that both must have served to be among them.
PAIRS, LEAST_TOGETHER = 10, 10

#: Columns of the printed tables: name in the frame -> heading, format.
SUMMARY_COLUMNS = {
    "part": ("part", ""), "layer": ("layer", ""), "effective_experts": ("effective", ".1f"), "gini": ("Gini", ".3f"),
    "dead": ("dead", ""), "hot": ("hot", ""), "hottest": ("hottest", ""), "largest_share": ("its share", ".1%"),
    "mean_margin": ("margin", ".3f"), "topk_mass": ("top-k mass", ".3f"), "router_entropy": ("entropy", ".2f"),
    "near_ties": ("near ties", ""), "bad": ("not finite", ""),
}  # fmt: skip
FLIP_COLUMNS = {
    "part": ("part", ""), "layer": ("layer", ""), "set_flips": ("set flips", ""), "set_flip_rate": ("rate", ".2%"),
    "order_flips": ("order flips", ""), "order_flip_rate": ("order rate", ".2%"), "first_flips": ("first here", ""),
    "near_ties": ("near ties", ""), "flip_margin": ("margin there", ".2g"),
    "largest_flip_margin": ("largest", ".2g"), "median_margin": ("margin of all", ".2g"),
    "uncompared": ("not compared", ""),
}  # fmt: skip


def add(commands) -> None:
    parser = add_command(
        commands, "routing", run, "Record which experts serve which tokens, and compare two runs.",
        "workbench routing data/miniature --file data/routing.jsonl --dtype float32 --against-dtype bfloat16",
        [model_options()],
    )  # fmt: skip
    prompts = parser.add_argument_group("prompts", "at least one; all are recorded, each by itself")
    prompts.add_argument("--prompt", metavar="TEXT", action="append", default=[], help="may be given several times")
    prompts.add_argument(
        "--file", metavar="FILE", type=Path, action="append", default=[],
        help='a UTF-8 text; .jsonl: one prompt a line, {"messages": [...]}, {"text": ..., "kind", "title"} or a list '
        "of token ids; .json: one of these or a list of them; may be given several times",
    )  # fmt: skip
    against = parser.add_argument_group("comparison", "a second run of the same prompts with other settings")
    against.add_argument("--against", metavar="DIR", type=Path, help="a record that --save wrote")
    against.add_argument("--against-dtype", metavar="DTYPE")
    against.add_argument("--against-policy", metavar="NAME|FILE")
    against.add_argument("--against-backend", metavar="[OP=]NAME[:POLICY]")
    against.add_argument("--against-router-dtype", metavar="DTYPE", choices=ROUTER_DTYPES)
    parser.add_argument("--hot", metavar="X", type=float, default=2.0,
                        help="an expert is hot with X times the even share, tokens * top-k / experts (2)")  # fmt: skip
    parser.add_argument("--save", metavar="DIR", type=Path, help="write the record as a bundle: safetensors + JSON")
    parser.add_argument("--logits", action="store_true", help="keep the router logits in the record (float32)")
    parser.add_argument("--json", metavar="FILE|-", help="write all tables as JSON")


def run(options: argparse.Namespace) -> int:
    from workbench.analysis import routing
    from workbench.provenance import checkpoint_hash
    from workbench.tokenizer import Tokenizer

    other = _other_options(options)
    if not 0 < options.hot < math.inf:
        raise InputError(f"--hot: expected a finite number above 0, found {options.hot}")
    if options.logits and options.save is None:
        raise InputError("--logits: expected with --save, found it alone; no table shows logits")
    if not (options.prompt or options.file):
        raise InputError("routing: expected --prompt or --file at least once, found none")
    before = None if options.against is None else routing.load_record(options.against)
    model = load_model(options)
    folder = folder_of(options.checkpoint)
    tokenizer = functools.cache(lambda: Tokenizer.from_directory(folder))
    prompts: list[RoutingPrompt] = [
        routing.text_prompt(text, tokenizer(), title=f"--prompt {n}", where="--prompt")
        for n, text in enumerate(options.prompt, start=1)
    ]
    for file in options.file:
        prompts += routing.read_prompts(file, tokenizer, vocabulary=model.config.vocab_size)
    record = functools.partial(routing.record, prompts=prompts, model_hash=checkpoint_hash(folder))
    seen = record(model, keep_logits=options.logits, progress=Progress("routing"))
    if options.save is not None:
        seen.save(options.save)
    if other is not None:
        before = record(load_model(other), progress=Progress("routing, second run"))
    flips = None if before is None else routing.compare(seen, before)
    bad = seen.bad_tokens + (0 if before is None else before.bad_tokens)
    if options.json is not None:
        write_json({**_content(options, seen, flips), "card": card_name(model)}, options.json)
    if options.json != "-":
        print(_text(options, seen, flips))
    return FAULT if bad else FINE


def _other_options(options: argparse.Namespace) -> argparse.Namespace | None:
    """The options of the second run; None where there is none."""
    given = {name: value for name in AGAINST if (value := getattr(options, name)) is not None}
    if not given:
        return None
    if options.against is not None:
        raise InputError(
            f"--against and --{next(iter(given)).replace('_', '-')}: expected one comparison, found two; leave one out"
        )
    other = copy.copy(options)
    for name, value in given.items():
        setattr(other, AGAINST[name], value)
    return other


class Progress:
    """A line on stderr for work that takes longer than `PATIENCE`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.started = time.monotonic()
        self.next = self.started + PATIENCE

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now < self.next or done == total:
            return
        self.next = now + INTERVAL
        left = (now - self.started) / done * (total - done)
        print(f"{self.name}: {done / total:.0%} done, about {left:.0f} s left", file=sys.stderr, flush=True)


def _content(options: argparse.Namespace, seen: RoutingRecord, flips: RoutingFlips | None) -> dict[str, Any]:
    from workbench.analysis import routing

    content = {
        "checkpoint": str(options.checkpoint), **_about(seen),
        "experts": seen.num_experts, "top_k": seen.top_k, "hot_factor": options.hot,
        "prompts": [{"kind": p.kind, "title": p.title, "tokens": len(p.ids)} for p in seen.prompts],
        "layers": _rows(routing.summarise(seen, options.hot)),
        "load": _rows(routing.load_table(seen)),
        "coactivation": [
            row
            for part in seen.parts
            for row in _rows(routing.coactivation(seen, part.name).pairs(PAIRS, LEAST_TOGETHER))
        ],
        "drift": [row for part in seen.parts for row in _rows(routing.position_drift(seen, part=part.name))],
        "not_finite": _rows(routing.bad_table(seen)),
    }  # fmt: skip
    if flips is not None:
        content["against"] = {
            **_about(flips.second), "same_checkpoint": flips.is_one_checkpoint,
            "totals": _rows(routing.flip_totals(flips)), "layers": _rows(routing.flips_by_layer(flips)),
            "tokens": _rows(routing.flips_by_token(flips).query("set_flips > 0 or order_flips > 0")),
            "not_finite": _rows(routing.bad_table(flips.second)),
        }  # fmt: skip
    return content


def _about(record: RoutingRecord) -> dict[str, Any]:
    return {
        "model_hash": record.origin.model_hash, "dtype": record.dtype, "router_dtype": record.router_dtype,
        "policy": record.origin.policy, "backends": list(record.origin.backends),
    }  # fmt: skip


def _rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    missing = frame.isna()
    return frame.astype(object).where(~missing, None).to_dict("records")


def _text(options: argparse.Namespace, seen: RoutingRecord, flips: RoutingFlips | None) -> str:
    from workbench.analysis import routing
    from workbench.analysis.wording import counted

    table = routing.summarise(seen, options.hot)
    main = seen.part("model")
    lines = [
        f"{counted(len(main.token), 'token')} of {counted(len(seen.prompts), 'prompt')}, "
        f"{counted(len(main.layers), 'layer')}, top {seen.top_k} of {counted(seen.num_experts, 'expert')}, "
        f"{_name(seen)}",
        _bad_line(seen, "the logits of every router are finite"),
        "",
        _table(table, SUMMARY_COLUMNS),
        "",
        f"effective: exp of the load's entropy, at most {seen.num_experts}; hot: at least {options.hot:g} times the "
        f"even share {1 / seen.num_experts:.2%}; its share: at most {1 / seen.top_k:.1%}",
        "margin: mean of logit top-k minus the next; near ties: tokens where it is below 1e-5; entropy: of a token's "
        "probabilities, nats",
    ]
    expected = table["dead_expected"].max()
    if expected >= 0.5:
        lines.append(
            f"so few tokens leave up to {counted(round(expected), 'expert')} a layer without any under an even choice"
        )
    if flips is None:
        return "\n".join(lines)
    lines += ["", f"Against {_name(flips.second)}:"]
    if flips.is_one_checkpoint is False:
        lines.append("the weights differ: the two records are of different checkpoints")
    if flips.second.bad_tokens:
        lines.append(_bad_line(flips.second, ""))
    lines += [
        f"{row.part}: other experts in {row.set_flips:,} of {counted(row.pairs, 'choice')} "
        f"({_share(row.set_flip_rate)}), another order in {row.order_flips:,} ({_share(row.order_flip_rate)}); "
        f"{row.tokens_flipped:,} of {counted(row.tokens, 'token')} "
        f"({_share(row.tokens_flipped_rate)}) have other experts in some layer"
        for row in routing.flip_totals(flips).itertuples()
    ]
    lines += ["", _table(routing.flips_by_layer(flips), FLIP_COLUMNS), "",
              "set flips: other experts; first here: tokens without one in a lower layer; margin there: median of the "
              "first run's at set flips"]  # fmt: skip
    return "\n".join(lines)


def _bad_line(record: RoutingRecord, fine: str) -> str:
    from workbench.analysis import routing
    from workbench.analysis.wording import counted

    if not record.bad_tokens:
        return fine
    bad = routing.bad_table(record)
    first = bad.iloc[0]
    return (
        f"NOT FINITE: router logits of {counted(len(bad), 'choice')}, first part {first['part']}, layer "
        f"{first['layer']}, prompt {first['prompt']}, position {first['position']}, token {first['token']}; they count "
        "nowhere below; `workbench trace` names the first bad op"
    )


def _name(record: RoutingRecord) -> str:
    from workbench.numerics import PRESETS, resolve_policy

    named = [name for name in PRESETS if resolve_policy(name).to_json() == record.origin.policy]
    router = "" if record.router_dtype is None else f", router {record.router_dtype}"
    return f"{record.dtype}{router}, policy {named[0] if named else 'of its own'}"


def _share(rate: float) -> str:
    """A share in per cent; a dash where nothing was compared."""
    return "-" if math.isnan(rate) else f"{rate:.2%}"


def _table(frame: pd.DataFrame, columns: dict[str, tuple[str, str]]) -> str:
    shown = frame[list(columns)].rename(columns={name: heading for name, (heading, _) in columns.items()})
    shown = shown.astype(object).where(~shown.isna(), None)
    return text_table(shown, dict(columns.values()))
