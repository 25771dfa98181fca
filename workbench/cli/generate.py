"""`workbench generate`: continue a prompt.

A step that runs out of memory is rolled back and run once more (`workbench.recovery`), which a line on stderr tells. If
that fails too, the text ends there, the reason and a table of what holds the memory go to stderr, and the exit code
is 1: the input is usable, this machine has too little memory for it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.cli.inputs import card_name, folder_of, input_tensor, load_model, prompt_ids
from workbench.cli.options import add_command, model_options, prompt_options
from workbench.cli.outcome import FAULT, FINE
from workbench.cli.output import write_json
from workbench.config import read_json_object
from workbench.errors import InputError

if TYPE_CHECKING:
    from workbench.recovery import Incident
    from workbench.tokenizer import Tokenizer


def add(commands) -> None:
    parser = add_command(
        commands, "generate", run, "Continue a prompt, writing tokens as they come.",
        'workbench generate data/miniature --prompt "Shall I compare thee" --max-new-tokens 40',
        [model_options(), prompt_options()],
    )  # fmt: skip
    parser.add_argument("--max-new-tokens", metavar="N", type=int, default=128, help="default 128")
    parser.add_argument(
        "--temperature", metavar="X", type=float, default=0.0, help="0 (default) takes the likeliest token"
    )
    parser.add_argument(
        "--top-p", metavar="P", type=float, default=1.0, help="draw from the likeliest tokens of mass P"
    )
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of the draws (default 0)")
    parser.add_argument(
        "--stop", metavar="TOKEN", action="append", default=[],
        help="end after this token too, e.g. '<|im_end|>'; may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object at the end in place of the text"
    )


def run(options: argparse.Namespace) -> int:
    from workbench.recovery import Recovery, Request, serve_requests
    from workbench.tokenizer import Tokenizer

    model = load_model(options)
    input_ids = input_tensor(model, prompt_ids(options))
    folder = folder_of(options.checkpoint)
    has_tokenizer = options.ids is None or (folder / "tokenizer.json").exists()
    tokenizer = Tokenizer.from_directory(folder) if has_tokenizer else None
    stop_ids = stop_tokens(model.config.eos_token_id, tokenizer, folder, options.stop)
    stream = None if options.json else _Printer(tokenizer)
    recovery = Recovery(model, _tell_recovered)
    request = Request(
        input_ids=input_ids, max_new_tokens=options.max_new_tokens, temperature=options.temperature,
        top_p=options.top_p, stop_ids=stop_ids, seed=options.seed,
    )  # fmt: skip
    (outcome,) = serve_requests(model, [request], recovery=recovery, stream=stream)
    if stream is not None:
        stream.finish()
    failure = outcome.failure
    if failure is not None:
        print(f"workbench: error: {failure}\n{failure.table}", file=sys.stderr)
    if options.json:
        text = None if tokenizer is None else tokenizer.decode(outcome.tokens, skip_special=True)
        content = {
            "text": text, "tokens": outcome.tokens, "reason": outcome.reason, "prompt_tokens": input_ids.shape[1],
            "card": card_name(model), "temperature": options.temperature, "top_p": options.top_p, "seed": options.seed,
            "out_of_memory": [incident.to_json() for incident in recovery.incidents],
            "memory": None if failure is None else failure.table.to_json(),
        }  # fmt: skip
        write_json(content, "-")
    return FINE if failure is None else FAULT


def _tell_recovered(incident: Incident) -> None:
    if incident.is_recovered:  # the other is the error that ends the command
        print(f"workbench: note: {incident}", file=sys.stderr)


def stop_tokens(
    config_ids: Collection[int], tokenizer: Tokenizer | None, folder: Path, wanted: Collection[str]
) -> set[int]:
    """Ids that end a text: those of config.json, generation_config.json and the tokenizer, and the tokens asked for."""
    found = set(config_ids)
    settings = folder / "generation_config.json"
    if settings.exists():
        listed = read_json_object(settings).get("eos_token_id")
        listed = [] if listed is None else listed if isinstance(listed, list) else [listed]
        if not all(type(token) is int for token in listed):
            raise InputError(f"{settings}: eos_token_id: expected a token id or a list of them, found {listed}")
        found.update(listed)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    if wanted and tokenizer is None:
        raise InputError(f"--stop {wanted[0]}: expected a tokenizer beside the weights to know the token, found none")
    for text in wanted:
        ids = tokenizer.encode(text)
        if len(ids) != 1:
            raise InputError(f"--stop {text!r}: expected the text of one token, found that of {len(ids)}")
        found.add(ids[0])
    return found


class _Printer:
    """Prints each token as soon as its characters are whole; ids where there is no tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None):
        self.decoder = None if tokenizer is None else tokenizer.stream_decoder()

    def __call__(self, _: int, token: int) -> None:
        self._write(f"{token} " if self.decoder is None else self.decoder.push(token))

    def finish(self) -> None:
        self._write(("" if self.decoder is None else self.decoder.finish()) + "\n")

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
