"""`workbench backends`: what can compute each op here or on a card, and the exact reason where something cannot."""

from __future__ import annotations

import argparse
import textwrap
from dataclasses import replace
from typing import TYPE_CHECKING

from workbench.cli.options import add_card, add_command
from workbench.cli.output import write_json
from workbench.errors import BackendError, InputError

if TYPE_CHECKING:
    from workbench.cards import Card
    from workbench.kernels.registry import Backend, Call

#: Tokens of the two kinds of call that are asked for.
PHASES = {"decode": 1, "prefill": 512}


def add(commands) -> None:
    parser = add_command(
        commands, "backends", run,
        "List the backends of every op: available, or the reason why not, and what is chosen where nobody names one.",
        "workbench backends --op gated_delta_rule --device cuda --dtype bfloat16",
    )  # fmt: skip
    parser.add_argument("--op", metavar="OP", action="append", help="only this op; may be repeated")
    parser.add_argument("--dtype", metavar="DTYPE", help="of the call: float32, bfloat16, float16 or float64; default: "
                        "float32, of a card what it runs models in")  # fmt: skip
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where this machine has it, else cpu")
    add_card(parser)
    parser.add_argument("--json", metavar="FILE|-", help="write the table as JSON")


def run(options: argparse.Namespace) -> int:
    import torch

    import workbench.kernels as declared
    from workbench.cards import card_named
    from workbench.kernels.machine import rehearsed_machine, this_machine
    from workbench.kernels.registry import OPERATIONS, Call, operation_named
    from workbench.loading import dtype_named

    card = None if options.card is None else card_named(options.card)
    if card is not None and options.device is not None:
        raise InputError(f"--device {options.device}: expected none beside --card {options.card}, which has its own")
    dtype = dtype_named(options.dtype or (card.model_dtype if card is not None else "float32"))
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    machine = this_machine(device) if card is None else rehearsed_machine(card)
    operations = [operation_named(op) for op in options.op or OPERATIONS]
    policy = declared.Kernels().policy
    rows = []
    for operation in operations:
        calls = {
            phase: Call(operation.name, machine.device, dtype, tokens, False, False, policy, (), machine, device)
            for phase, tokens in PHASES.items()
        }  # fmt: skip
        chosen = {phase: _chosen(call, card) for phase, call in calls.items()}
        for backend in operation.backends.values():
            reasons = {phase: _reason(backend, call) for phase, call in calls.items()}
            rows.append({
                "op": operation.name, "backend": backend.name,
                "available": [phase for phase, reason in reasons.items() if reason is None],
                "chosen": [phase for phase, name in chosen.items() if name == backend.name],
                "policy": backend.policy, "reasons": {p: reason for p, reason in reasons.items() if reason is not None},
            })  # fmt: skip
    content = {
        "machine": machine.name, "device": machine.device, "rehearsed": not machine.is_here,
        "capability": None if machine.capability is None else list(machine.capability),
        "dtype": str(dtype).removeprefix("torch."), "tokens": PHASES, "backends": rows,
    }  # fmt: skip
    if options.json is not None:
        write_json(content, options.json)
    if options.json != "-":
        print(_text(content))
    return 0


def _reason(backend: Backend, call: Call) -> str | None:
    """Why a backend cannot serve a call on the machine asked about; by its own policy where it has one."""
    from workbench.numerics import resolve_policy

    if backend.policy is not None:
        call = replace(call, policy=resolve_policy(backend.policy))
    return backend.requires.lack(call) or backend.supports(call)


def _chosen(call: Call, card: Card | None) -> str | None:
    """The backend that is taken where nobody names one; None where there is none."""
    from workbench.kernels.registry import resolve

    try:
        return resolve(call, None, card).backend.name
    except BackendError:
        return None


def _text(content: dict) -> str:
    where = f"{content['machine']}{', rehearsed' if content['rehearsed'] else ''}"
    lines = [
        f"{where}, {content['dtype']}; decode is a call of {PHASES['decode']} token, prefill of {PHASES['prefill']}. "
        "* is chosen where nobody names one.",
    ]  # fmt: skip
    op = None
    for row in content["backends"]:
        if row["op"] != op:
            op = row["op"]
            lines += ["", op]
        served = [f"{phase}{'*' if phase in row['chosen'] else ''}" for phase in row["available"]]
        policy = f"  (policy {row['policy']})" if row["policy"] else ""
        lines.append(f"  {row['backend']:<18}{', '.join(served) or 'not available'}{policy}")
        for reason in dict.fromkeys(row["reasons"].values()):
            phases = [phase for phase, found in row["reasons"].items() if found == reason]
            which = "" if len(phases) == len(PHASES) else f"{' and '.join(phases)}: "
            lines += textwrap.wrap(which + reason, 100, initial_indent=" " * 20, subsequent_indent=" " * 20)
    return "\n".join(lines)
