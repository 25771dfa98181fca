"""`workbench conformance`: hold a backend, or a function that nobody has registered, to the contract of its op."""

from __future__ import annotations

import argparse
import inspect
import sys
import textwrap
import time
from typing import TYPE_CHECKING, Any

from workbench.cli.options import add_command
from workbench.cli.outcome import FAULT, FINE
from workbench.cli.output import write_json
from workbench.errors import BackendError, InputError

if TYPE_CHECKING:
    from workbench.kernels.conformance import Conformance
    from workbench.kernels.contract import Contract
    from workbench.kernels.registry import Backend

#: Failures that the text shows of each backend; the JSON has all.
SHOWN = 5
#: Seconds from which on progress is told.
PATIENCE = 2.0


def add(commands) -> None:
    parser = add_command(
        commands, "conformance", run,
        "Hold a backend, or a function of yours, to the contract of its op: values, dtypes, memory, strides, NaN, "
        "gradients.",
        "workbench conformance gated_delta_rule --backend my_kernels:delta_rule --device cuda --dtype float16",
    )  # fmt: skip
    parser.add_argument("op", metavar="OP", help="an op of `workbench backends`, or all")
    parser.add_argument(
        "--backend", metavar="NAME|MODULE:FUNCTION", help="a registered backend, or a function with the contract's "
        "signature; the current folder is on the path; `supports`, REQUIRES, MUTATES, POLICY and ROUNDS_INSIDE of its "
        "module count; default: every backend of the op",
    )  # fmt: skip
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda or cuda:N")
    parser.add_argument("--dtype", metavar="DTYPE,..", help="float32, bfloat16, float16, float64; default: all")
    parser.add_argument("--case", metavar="NAME", action="append", help="only this case; may be repeated")
    parser.add_argument("--inference", action="store_true", help="MODULE:FUNCTION has no backward pass")
    parser.add_argument("--contract", action="store_true", help="print the contract and run nothing")
    parser.add_argument("--json", metavar="FILE|-", help="write every check as JSON")


def run(options: argparse.Namespace) -> int:
    from workbench.kernels.conformance import CONTRACTS, contract_of

    contracts = list(CONTRACTS.values()) if options.op == "all" else [contract_of(options.op)]
    if options.contract:
        content = {"contracts": [contract_content(contract) for contract in contracts]}
        if options.json is not None:
            write_json(content, options.json)
        if options.json != "-":
            print("\n\n".join(contract_text(c) for c in content["contracts"]))
        return FINE
    found = _conform(options, contracts)
    content = {"device": options.device, "results": [one.to_json() for one in found]}
    if options.json is not None:
        write_json(content, options.json)
    if options.json != "-":
        print(results_text(found))
    if any(one.outcome == "failed" for one in found):
        return FAULT
    if not any(one.outcome == "passed" for one in found):
        reasons = "; ".join(f"{one.op} {one.backend}: {one.reason}" for one in found)
        raise InputError(f"conformance: nothing was served, so that nothing is known: {reasons}")
    return FINE


def _conform(options: argparse.Namespace, contracts: list[Contract]) -> list[Conformance]:
    from workbench.kernels.conformance import conform
    from workbench.kernels.registry import OPERATIONS
    from workbench.loading import dtype_named

    _check_device(options.device)
    dtypes = None if options.dtype is None else [dtype_named(name.strip()) for name in options.dtype.split(",")]
    if options.backend is None or ":" not in options.backend:
        jobs: list[tuple[Contract, str | Backend]] = [
            (contract, name)
            for contract in contracts
            for name in OPERATIONS[contract.op].backends
            if options.backend in (None, name)
        ]
        if not jobs:
            known = sorted({name for contract in contracts for name in OPERATIONS[contract.op].backends})
            raise BackendError(
                f"--backend {options.backend}: op {options.op} has none of that name, expected one of "
                f"{', '.join(known)}, or module:function for a function that is not registered"
            )
        if options.inference:
            raise InputError("--inference: expected beside --backend MODULE:FUNCTION; a registered backend says so")
    elif len(contracts) > 1:
        raise InputError(f"--backend {options.backend}: expected the function's op, found {options.op}; name it")
    else:
        jobs = [(contracts[0], _foreign(contracts[0], options.backend, options.inference))]
    found, started = [], time.monotonic()
    for contract, backend in jobs:
        name = backend if isinstance(backend, str) else backend.name
        if time.monotonic() - started > PATIENCE:
            print(f"conformance: {len(found)} of {len(jobs)} backends, now {contract.op} {name}", file=sys.stderr)
        taken = dtypes
        if dtypes is not None and options.op == "all":  # an op of whole numbers alone has none of them
            taken = [dtype for dtype in dtypes if dtype in contract.dtypes] or contract.dtypes
        found.append(conform(contract.op, backend, device=options.device, dtypes=taken, cases=options.case))
    return found


def _check_device(name: str) -> None:
    import torch

    kind = name.split(":")[0]
    if kind not in ("cpu", "cuda"):
        raise InputError(f"--device {name}: expected cpu, cuda or cuda:N")
    if kind == "cuda" and not torch.cuda.is_available():
        raise InputError(f"--device {name}: this machine has no CUDA device that torch can use")


def _foreign(contract: Contract, symbol: str, inference: bool) -> Backend:
    """The backend of ``module:function``; all that its import raises is told. Nothing of it is called."""
    from workbench.kernels.conformance import unfit
    from workbench.kernels.registry import Backend
    from workbench.kernels.requirements import Requires, load_symbol

    if sys.path[0] != "":
        sys.path.insert(0, "")  # the current folder
    function = load_symbol(symbol)
    if not callable(function):
        raise BackendError(f"--backend {symbol}: expected a function, found {type(function).__name__}")
    wrong = unfit(contract.op, function)
    if wrong:
        raise BackendError(
            f"--backend {symbol}: {wrong}; `workbench conformance {contract.op} --contract` explains every argument"
        )
    module = sys.modules[symbol.partition(":")[0]]
    says = getattr(module, "supports", lambda call: None)

    def supports(call) -> str | None:
        return "it has no backward pass (--inference)" if inference and call.needs_grad else says(call)

    return Backend(
        contract.op, symbol, function, supports, getattr(module, "REQUIRES", Requires()),
        tuple(getattr(module, "MUTATES", ())), getattr(module, "POLICY", None),
        rounds_inside=getattr(module, "ROUNDS_INSIDE", False),
    )  # fmt: skip


# ---- the contract as text


def contract_content(contract: Contract) -> dict[str, Any]:
    """What someone needs to write a backend without reading our code."""
    import torch

    from workbench.kernels.conformance import CHECKS, signature_of, signature_text
    from workbench.kernels.requirements import dtype_name

    def shown(value: object) -> str:
        if isinstance(value, torch.Tensor):
            return f"{list(value.shape)}" + ("" if value.is_floating_point() else f" {dtype_name(value.dtype)}")
        return repr(value)

    return {
        "op": contract.op,
        "signature": f"run{signature_text(contract.op)}",
        "text": inspect.getdoc(contract.spec),
        "dtypes": [dtype_name(dtype) for dtype in contract.dtypes],
        "wide": list(contract.wide),
        "on_host": [name for name in contract.on_host if name in signature_of(contract.op).parameters],
        "outputs": {
            output: {dtype_name(d): dtype_name(contract.output_dtype(d, output)) for d in contract.dtypes}
            for output in contract.outputs
        },
        "tolerance": contract.tolerance,
        "limits": {
            output: {dtype_name(d): contract.limit(d, output) for d in contract.dtypes} for output in contract.outputs
        },
        "may_update": list(contract.may_update),
        "checks": [*CHECKS, *contract.laws],
        "cases": {
            name: {key: shown(value) for key, value in case.items() if value is not None}
            for name, case in contract.cases().items()
        },
        "nan_probes": {name: probe.reason for name, probe in contract.probes().items()},
    }


def _dtype_text(output: str, by: dict[str, str]) -> str:
    """``state is float32 for bfloat16, float32 for float16``, in the least words."""
    if len(set(by.values())) == 1:
        return f"{output} is {next(iter(by.values()))}"
    others = [f"{to} for {given}" for given, to in by.items() if to != given]
    return f"{output} is {', '.join(others)}, else as the call" if others else f"{output} is as the call"


def contract_text(content: dict[str, Any]) -> str:
    """The contract of one op in plain text."""
    updates = ", ".join(content["may_update"])
    rules = [
        f"Called as {content['signature']}: what stands before * by position, the rest by name.",
        f"Dtypes of a call: {', '.join(content['dtypes'])}. A backend refuses what it cannot do: supports(call) "
        "returns the reason, or REQUIRES declares devices, dtypes, compute capability and symbols.",
        *([f"fp32 or better whatever the dtype of the call: {', '.join(content['wide'])}."] if content["wide"] else []),
        f"Outputs: {'; '.join(_dtype_text(*pair) for pair in content['outputs'].items())}. Each is new memory.",
        "In place: " + (
            f"only {updates} may be updated, by a backend that lists it in MUTATES; every other input stays as it was."
            if updates else "nothing; every input stays as it was to the last bit."
        ),
        "Inputs may have any strides"
        + f"{' (but ' + ', '.join(content['on_host']) + ': contiguous, on the CPU)' if content['on_host'] else ''}.",
        f"Error, norm(x - arbiter) / norm(arbiter) over a whole output, at most: {content['tolerance']}. The arbiter "
        "is the formula in float64, fed the same rounded inputs.",
        *(["A kernel whose inner products take operands rounded to the dtype of the call says so by ROUNDS_INSIDE: "
           "each output that need not be exact then has the widest limit of all in that dtype."]
          if any(len({*by} - {0.0}) > 1 for by in zip(*(x.values() for x in content["limits"].values()), strict=True))
          else []),
        "A NaN is never replaced, and reaches nothing that does not read it. Memory that was not written is not read. "
        "The same call gives the same bits.",
        "A backend without a backward pass refuses calls with call.needs_grad.",
    ]  # fmt: skip
    lines = [f"== {content['op']} ==", "", content["text"], "", "-- rules --"]
    lines += [textwrap.fill(rule, 118, subsequent_indent="  ") for rule in rules]
    lines += ["", f"-- checks -- {', '.join(content['checks'])}", "", "-- cases --"]
    lines += [
        textwrap.fill(f"{name}: " + ", ".join(f"{key} {value}" for key, value in case.items()), 118,
                      subsequent_indent="    ")
        for name, case in content["cases"].items()
    ]  # fmt: skip
    lines += ["", "-- calls with NaN --", textwrap.fill("; ".join(content["nan_probes"]) or "none", 118)]
    return "\n".join(lines)


# ---- results as text


def results_text(found: list[Conformance]) -> str:
    """A table of checks by outcome for one backend, a line for each of several; then the first failures."""
    if len(found) == 1:
        blocks = [_checks_text(found[0])]
    else:
        wide = max(len(one.op) for one in found), max(len(one.backend) for one in found)
        blocks = ["\n".join(
            f"{one.op.ljust(wide[0])}  {one.backend.ljust(wide[1])}  {one.outcome}" + (
                f", {len(one.failures)} of {len(one.rows)} checks" if one.outcome == "failed"
                else f": {textwrap.shorten(one.reason, 160, placeholder=' ...')}" if one.outcome == "refused"
                else f", {sum(row.outcome == 'passed' for row in one.rows)} checks"
            )
            for one in found
        )]  # fmt: skip
    for one in found:
        if one.failures:
            blocks.append("\n".join([
                f"-- {one.op} {one.backend}: the first {min(SHOWN, len(one.failures))} of {len(one.failures)} failures",
                *map(str, _first_of_each(one)),
            ]))  # fmt: skip
    return "\n\n".join(blocks)


def _first_of_each(one: Conformance) -> list:
    """The first failure of each check before second ones of any, so that no kind of fault hides another."""
    first: dict[str, object] = {}
    for row in one.failures:
        first.setdefault(row.check, row)
    rest = [row for row in one.failures if first[row.check] is not row]
    return [*first.values(), *rest][:SHOWN]


def _checks_text(one: Conformance) -> str:
    counts = one.counts()
    width = max(map(len, [*counts, "check"]))
    lines = [f"{one.op} {one.backend} on {one.device}: {one.outcome}", ""]
    lines.append(f"{'check'.ljust(width)}  passed  refused  failed")
    lines += [
        f"{check.ljust(width)}  {n['passed']:6d}  {n['refused']:7d}  {n['failed']:6d}" for check, n in counts.items()
    ]
    refusals: dict[str, int] = {}
    for row in one.rows:
        if row.outcome == "refused":
            refusals[row.reason] = refusals.get(row.reason, 0) + 1
    if refusals:
        lines += ["", "refused:"]
        lines += [
            textwrap.fill(f"{count} checks: {reason}", 118, initial_indent="  ", subsequent_indent="    ")
            for reason, count in refusals.items()
        ]
    return "\n".join(lines)
