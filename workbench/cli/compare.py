"""`workbench compare`: two backends, policies, dtypes, saved runs or engines on the same tokens, stage by stage."""

from __future__ import annotations

import argparse
import os
import shlex
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.cli.inputs import folder_of, print_plan, prompt_ids, register_bridges
from workbench.cli.options import add_bridge, add_card, add_command, add_expert_layout, prompt_options
from workbench.cli.output import check_file, text_table, write_file, write_json
from workbench.errors import InputError
from workbench.numerics import LARGEST

if TYPE_CHECKING:
    import pandas as pd

    from workbench.analysis.compare import Comparison

#: Columns of the printed table: name in the frame -> heading.
HEADINGS = {
    "step": "pass", "tap": "tap", "error": "error", "max_error": "largest", "worst_row_error": "worst row",
    "roundings": "roundings", "rounding": "of", "own_a": "a/float64", "own_b": "b/float64",
}  # fmt: skip
#: Files of `--out DIR`.
PAGE, VERDICT = "comparison.html", "comparison.json"


def add(commands) -> None:
    parser = add_command(
        commands, "compare", run, "Run two sides on the same tokens and name the first op at which they part.",
        'workbench compare data/miniature --a torch_chunk --b torch_recurrent --prompt "Shall I compare thee"',
        [prompt_options(is_optional=True)],
    )  # fmt: skip
    group = parser.add_argument_group("sides", "SIDE: [OP=]NAME[:POLICY], several separated by commas; auto; :POLICY "
                                      "alone; hf for transformers; or the directory of a saved bundle")  # fmt: skip
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", type=Path, nargs="?",
        help="directory with config.json and safetensors; not needed for two bundles",
    )  # fmt: skip
    for side in "ab":
        group.add_argument(f"--{side}", metavar="SIDE", required=True)
    for side in "ab":
        group.add_argument(f"--dtype-{side}", metavar="DTYPE", help=f"{', '.join(LARGEST)}; default: as stored")
    for side in "ab":
        group.add_argument(f"--map-{side}", metavar="FILE", type=Path,
                           help="JSON, our tap names to those of a bundle of another engine")  # fmt: skip
    for side in "ab":
        group.add_argument(f"--save-{side}", metavar="DIR", type=Path,
                           help="write the side's tensors and tokens as a bundle, to be a side elsewhere")  # fmt: skip
    add_expert_layout(group)
    add_bridge(group)
    add_card(group)
    for side in "ab":
        group.add_argument(f"--card-{side}", metavar="NAME|FILE", help="the same for one side alone")
    group.add_argument("--device", default="cpu", help="cpu (default), cuda or cuda:N")
    parser.add_argument("--decode", metavar="N", type=int, default=0,
                        help="go on for N tokens after the prompt, those that side a finds likeliest (0)")  # fmt: skip
    parser.add_argument("--top", metavar="N", type=int, default=12, help="rows of the table to print (default 12)")
    parser.add_argument("--json", metavar="FILE|-", help="write the verdict and all tables as JSON")
    parser.add_argument("--out", metavar="FILE.html|DIR", type=Path,
                        help=f"write a page of figures and tables; a directory gets {PAGE} and {VERDICT}")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    from workbench.analysis.compare import compare, save_side
    from workbench.provenance import checkpoint_hash

    if options.top < 1:
        raise InputError(f"--top: expected at least 1, found {options.top}")
    if options.decode < 0:
        raise InputError(f"--decode: expected 0 or more, found {options.decode}")
    if options.checkpoint is not None and not options.checkpoint.exists():
        raise InputError(f"checkpoint {options.checkpoint}: expected a directory, found nothing there")
    for name in "ab":
        side = getattr(options, name)
        if os.sep in side and ":" not in side and not Path(side).is_dir():
            raise InputError(f"--{name} {side}: expected the directory of a bundle, found none there")
    taken = [Path(side).resolve() for side in (options.a, options.b) if Path(side).is_dir()]
    for name, path in (("a", options.save_a), ("b", options.save_b)):
        if path is not None:
            if path.resolve() in taken:
                raise InputError(f"--save-{name} {path}: expected a directory of its own, found one that is in use")
            taken.append(path.resolve())
    if options.out is not None:
        check_file(_page(options), "--out", makes_folders=True)
    register_bridges(options)
    _print_plans(options)
    result = compare(
        options.checkpoint, options.a, options.b, prompt=_prompt(options), decode=options.decode,
        dtype_a=options.dtype_a, dtype_b=options.dtype_b, device=options.device, expert_layout=options.expert_layout,
        mapping_a=options.map_a, mapping_b=options.map_b, card_a=options.card_a or options.card,
        card_b=options.card_b or options.card,
    )  # fmt: skip
    model_hash = None
    if options.checkpoint is not None and (options.save_a or options.save_b):
        model_hash = checkpoint_hash(folder_of(options.checkpoint))
    for side, path in ((result.a, options.save_a), (result.b, options.save_b)):
        if path is not None:
            save_side(side, path, model_hash=model_hash)
    content = {**result.to_json(), "checkpoint": None if options.checkpoint is None else str(options.checkpoint)}
    if options.json is not None:
        write_json(content, options.json)
    if options.out is not None:
        _write(result, content, options)
    if options.json != "-":
        print(_text(result, options.top))
    return result.verdict.exit_code


def _print_plans(options: argparse.Namespace) -> None:
    """What fits the cards to rehearse, a line each."""
    from workbench.cards import card_named
    from workbench.config import ModelConfig

    asked = {
        (card, getattr(options, f"dtype_{name}"))
        for name in "ab" if (card := getattr(options, f"card_{name}") or options.card) is not None
    }  # fmt: skip
    for name, dtype in sorted(asked, key=str):
        card = card_named(name)
        if options.checkpoint is not None:
            config = ModelConfig.from_file(folder_of(options.checkpoint))
            print_plan(config, card, dtype or card.model_dtype)


def _page(options: argparse.Namespace) -> Path:
    return options.out if options.out.suffix.lower() in (".html", ".htm") else options.out / PAGE


def _prompt(options: argparse.Namespace) -> list[int] | None:
    """The token ids of whichever prompt option was given; None without one."""
    sources = ("prompt", "prompt_file", "ids", "chat", "messages")
    if all(getattr(options, name) is None for name in sources):
        return None
    if options.checkpoint is None and options.ids is None:
        raise InputError("--prompt: expected a checkpoint, whose tokenizer reads it, found none; give --ids or none")
    return prompt_ids(options)


def _write(result: Comparison, content: dict, options: argparse.Namespace) -> None:
    from workbench.report.comparison import comparison_page

    page = _page(options)
    text = comparison_page(result, content["checkpoint"], _command(options))
    with suppress(OSError):  # the write itself says what is wrong
        page.parent.mkdir(parents=True, exist_ok=True)
    write_file(text, page, "--out")
    if page != options.out:
        write_json(content, str(options.out / VERDICT))


def _command(options: argparse.Namespace) -> str:
    """What repeats the comparison."""
    words = ["workbench", "compare", *([] if options.checkpoint is None else [str(options.checkpoint)])]
    for name in (
        "a", "b", "dtype_a", "dtype_b", "map_a", "map_b", "card", "card_a", "card_b", "expert_layout", "prompt",
        "prompt_file", "ids", "chat", "messages", "tools", "thinking",
    ):  # fmt: skip
        value = getattr(options, name)
        if value is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    words += [word for file in options.bridge for word in ("--bridge", str(file))]
    if options.device != "cpu":
        words += ["--device", options.device]
    if options.decode:
        words += ["--decode", str(options.decode)]
    return shlex.join(words)


def _text(result: Comparison, top: int) -> str:
    verdict = result.verdict
    lines = [f"{verdict.verdict}{'' if result.side is None else f', side {result.side}'}"]
    if verdict.where.tap is not None:
        lines.append(f"  where      {verdict.where.tap}")
    lines += [f"  evidence   {sentence}" for sentence in verdict.evidence]
    lines += [f"  ruled out  {sentence}" for sentence in verdict.ruled_out]
    different = result.stages[result.stages["error"] > 0]
    if len(different):
        shown = _shown(different, top)
        lines += ["", f"{len(shown)} of {len(different)} tensors that differ, in the order of computation:",
                  text_table(shown)]  # fmt: skip
    far = result.flips[~result.flips["is_near_tie"]] if len(result.flips) else result.flips
    if len(far):
        columns = ["layer", "position", "token", "margin", "replaced"]
        shown = far.sort_values("margin", ascending=False).head(top)[columns]
        lines += ["", f"{len(shown)} of {len(far)} tokens with other experts, those of the largest margin:",
                  text_table(shown)]  # fmt: skip
    left_out = result.not_compared
    if len(left_out):
        names = dict.fromkeys(f"{tap.partition('.')[2].partition('.')[2] or tap}" for tap in left_out["tap"])
        lines += ["", f"not compared: {len(left_out)} tensors ({', '.join(names)})"]
    return "\n".join(lines)


def _shown(different: pd.DataFrame, top: int) -> pd.DataFrame:
    return different.head(top)[list(HEADINGS)].rename(columns=HEADINGS)
