"""What a checkpoint would do on a card that is not here: a prompt run under the card's limits, and what follows.

    report = rehearse("data/miniature", "bi-v100", ids)
    report.verdict, report.changes

Three passes of one prompt are compared: under the limits of the card (`kernels.rehearsal`, in the dtype that the card
runs models in), in float32, and as the checkpoint is stored. Around them: which backend served each op and why others
did not, what became of every product, what float16 does to the checkpoint (`half_precision`), a plan of the card's
memory and the least time of a pass by the card's figures.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import torch
from torch import Tensor

from workbench.analysis.costs import OpCost, op_costs, price_of, total_seconds
from workbench.analysis.half_precision import Readiness, fp16_readiness
from workbench.analysis.memory_plan import UTILISATION, MemoryPlan, memory_plan, weights_in_files
from workbench.analysis.verdict import NOT_ESTABLISHED, Verdict, Where
from workbench.analysis.wording import counted, duration_text, size_text
from workbench.cards import Card, card_named
from workbench.config import ModelConfig
from workbench.errors import BackendError, BackendWarning, InputError
from workbench.kernels.agreement import logit_difference
from workbench.kernels.dispatch import Attestation
from workbench.kernels.registry import Call, operation_named
from workbench.kernels.rehearsal import ATTENTION, MATMUL, Seen
from workbench.loading import device_named, dtype_named, load

if TYPE_CHECKING:
    from workbench.model import CausalLM
    from workbench.numerics import NumericsPolicy

#: What a verdict may name, besides the causes of `half_precision`.
CANNOT_RUN, DOES_NOT_FIT, NOT_FINITE = "card_cannot_run", "does_not_fit", "not_finite_on_card"

#: Tokens of one pass in the table of costs, and the context of a step of decoding there.
PREFILL = 2048

#: What this package computes the delta rule in, for a plan without a run.
RULE_DTYPE = {"gated_delta_rule": "float32"}

#: How a backend says that the card could run it and this machine cannot (`kernels.requirements`).
CAN_RUN = " can run it"

OP_COLUMNS = ("op", "tokens", "backend", "calls", "dtype", "on_card", "why", "refused", "routed", "cast")
#: Of backends that run only where they are named; `can` says whether the card's limits allow it, `reason` why not.
NAMED_COLUMNS = ("op", "backend", "can", "reason")
PRODUCT_COLUMNS = (
    "op", "primitive", "dtype", "outcome", "library", "to", "calls", "flops", "factor", "overflowed", "flushed",
    "cast_overflowed", "cast_flushed", "why",
)  # fmt: skip
COST_COLUMNS = (
    "phase", "part", "op", "dtype", "calls", "flops", "bytes", "seconds", "share", "bound", "in_model_dtype", "factor",
    "how",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Change:
    """One thing to do before this checkpoint runs on the card: why, and what it costs; `must` where it cannot wait."""

    what: str
    why: str
    cost: str
    must: bool = False


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """The report.

    verdict     whether the checkpoint runs on the card, and what is in the way
    changes     what to do, in order
    ops         OP_COLUMNS: what served each op in the rehearsal; `on_card` is what would come first there: a library by
                the card's rules, a backend that this machine alone cannot run, else what served; `why` it does
    named       NAMED_COLUMNS: the backends of these ops that run only where they are named
    products    PRODUCT_COLUMNS: what became of every product; `factor` is its time against the card's model dtype
    costs       COST_COLUMNS: least time of a prompt of PREFILL tokens and of one token after them, on the card
    seconds     phase -> (least time with the dtypes that ran, with the card's model dtype throughout), None: unknown
    readiness   float16 readiness of the checkpoint, None where it was not asked for
    plan        memory
    accuracy    logits under the card and as stored against float32: largest difference of the largest logit; None where
                there is no run
    error       why there is no run, or none to its end
    ended       the op in which all runs under the limits ended, so that those after it are in no table; None: one came
                through, as asked, with everything chosen automatically or with failing backends replaced
    """

    card: Card
    checkpoint: str
    config: ModelConfig
    dtype: str
    stored: str
    tokens: int
    verdict: Verdict
    changes: tuple[Change, ...]
    ops: pd.DataFrame
    named: pd.DataFrame
    products: pd.DataFrame
    costs: pd.DataFrame
    seconds: dict[str, tuple[float | None, float | None]]
    readiness: Readiness | None
    plan: MemoryPlan
    accuracy: dict[str, float | int | None] | None
    error: str | None
    elapsed: float
    ended: str | None = None

    def to_json(self) -> dict[str, object]:
        """Plain JSON values: the verdict's fields first."""
        names = ("ops", "named", "products", "costs")
        tables = {name: getattr(self, name).astype(object).to_dict("records") for name in names}
        ready = None
        if self.readiness is not None:
            ready = self.readiness.verdict.to_json() | {
                "difference": self.readiness.difference, "limit": self.readiness.limit,
                "remedy": None if self.readiness.remedy is None else self.readiness.remedy.name,
                "remedies": self.readiness.remedies.astype(object).to_dict("records"),
            }  # fmt: skip
        return _plain(self.verdict.to_json() | {
            "card": self.card.name, "title": self.card.title, "checkpoint": self.checkpoint, "dtype": self.dtype,
            "stored": self.stored, "tokens": self.tokens, "error": self.error, "ended": self.ended,
            "accuracy": self.accuracy,
            "changes": [{"what": c.what, "why": c.why, "cost": c.cost, "must": c.must} for c in self.changes],
            "memory": self.plan.to_json(), "seconds": {k: list(v) for k, v in self.seconds.items()},
            "readiness": ready, "unknown": dict(self.card.unknown), **tables, "elapsed_s": self.elapsed,
        })  # fmt: skip


def _plain(value: object) -> object:
    """The same as values that JSON has: a number that is not finite is null."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "item"):  # a number of numpy
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(slots=True)
class _Passes:
    """What the run under the card's limits left; `error` where it ended."""

    logits: Tensor | None = None
    attestation: list[Attestation] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    narrowed: tuple[int, int] = (0, 0)
    error: str | None = None


def rehearse(
    checkpoint: str | Path, card: Card | str | Path, ids: Sequence[int], *, dtype: str | None = None,
    backend: str | None = None, policy: NumericsPolicy | str | None = None, router_dtype: str | None = None,
    device: str = "cpu", expert_layout: str | None = None, strict: bool = True, length: int | None = None,
    sequences: int = 1, prefill: int = PREFILL, utilisation: float = UTILISATION, with_readiness: bool = True,
    with_run: bool = True, progress: Callable[[str], None] | None = None,
) -> Rehearsal:  # fmt: skip
    """Rehearse `card` with the prompt `ids` on this machine's `device`; `with_run=False` needs none.

    dtype, backend, policy, router_dtype, expert_layout, strict
                    as `load` has them; `dtype` None is the card's
    length, sequences
                    what memory is planned for; length None is the model's longest
    prefill         tokens of a pass in the plan and in the table of costs
    with_readiness  whether float16 is tried with remedies, where the card runs models in float16
    with_run        False for a checkpoint that this machine cannot hold: memory and times alone, from the headers
    progress        is called with a line before each part

    A backend, policy or dtype that the card cannot serve is no error but the verdict. Raises InputError,
    CheckpointError and the like for what cannot be used on any machine, BackendError for a named backend that the card
    could run and this machine cannot.
    """
    started = time.monotonic()
    say = progress or (lambda line: None)
    card = card if isinstance(card, Card) else card_named(card)
    if not ids and with_run:
        raise InputError("prompt: expected at least one token, found none; give some text")
    dtype = card.model_dtype if dtype is None else dtype
    dtype_named(dtype)
    target = device_named(device)
    config, weights = weights_in_files(checkpoint, dtype, expert_layout=expert_layout)
    plan = memory_plan(config, card, dtype=dtype, length=length, sequences=sequences, prompt=prefill,
                       utilisation=utilisation, weights=weights)  # fmt: skip
    stored = _stored(checkpoint)
    if not with_run:
        products, ops = _products(card, ()), _ops(card, ())
        costs, seconds = _costs(config, card, dtype, products, prefill)
        changes = [_memory_change(plan)] if plan.fits is False else []
        changes += [] if dtype == stored else [_dtype_change(card, dtype, stored, None, None)]
        return Rehearsal(
            card=card, checkpoint=str(checkpoint), config=config, dtype=dtype, stored=stored, tokens=0,
            verdict=_plan_verdict(card, dtype, plan), changes=tuple(changes), ops=ops, named=_named(()),
            products=products, costs=costs, seconds=seconds, readiness=None, plan=plan, accuracy=None, error=None,
            elapsed=time.monotonic() - started,
        )  # fmt: skip
    common = {"router_dtype": router_dtype, "device": device, "expert_layout": expert_layout}
    asked = {**common, "backend": backend, "policy": policy, "strict": strict}
    input_ids = torch.tensor([list(ids)], device=target)

    say(f"{card.title}: a prompt of {counted(len(ids), 'token')} and one token more in {dtype}, under its limits")
    ran = _under_limits(checkpoint, card, dtype, input_ids, asked)
    plain = None
    if ran.error is not None and (backend is not None or policy is not None):
        say("the same with backends and policy chosen automatically")
        plain = _under_limits(checkpoint, card, dtype, input_ids, {**common, "strict": strict})
    last, detour = plain or ran, None
    if last.error is not None and strict:
        say("the same with the next backend in the place of each that ends it")
        detour = _detour(checkpoint, card, dtype, input_ids, asked if plain is None else common)
    accuracy, finite_wide = None, True
    if ran.logits is not None:
        say("the same prompt in float32 and as stored, without limits")
        accuracy, finite_wide = _accuracy(checkpoint, input_ids, ran.logits, asked)
    readiness, aside = None, None
    if with_readiness and card.model_dtype == "float16" and stored != "float16":
        ends = ran.error if plain is None else plain.error
        readiness, aside = _readiness(_as_stored(checkpoint, asked), input_ids, card, ends, say)

    shown = ran if ran.error is None or plain is None or plain.error is not None else plain
    shown = detour or shown
    products = _products(card, shown.seen)
    costs, seconds = _costs(config, card, dtype, products, prefill)
    ops = _ops(card, shown.attestation)
    verdict = _verdict(card, dtype, ran, plain, detour, plan, readiness, aside, accuracy, products,
                       finite_wide)  # fmt: skip
    changes = _changes(card, dtype, stored, ran, plain, detour, plan, readiness, accuracy, ops, products, costs)
    return Rehearsal(
        card=card, checkpoint=str(checkpoint), config=config, dtype=dtype, stored=stored, tokens=len(ids),
        verdict=verdict, changes=changes, ops=ops, named=_named(shown.calls), products=products, costs=costs,
        seconds=seconds, readiness=readiness, plan=plan, accuracy=accuracy, error=ran.error,
        elapsed=time.monotonic() - started, ended=None if shown.error is None else _op_in(shown.error) or "the model",
    )  # fmt: skip


# ---- runs


@torch.inference_mode()
def _under_limits(checkpoint: str | Path, card: Card, dtype: str, input_ids: Tensor, settings: dict) -> _Passes:
    """The prompt and one token more; a backend's error ends it and is kept."""
    model = load(checkpoint, dtype=dtype, card=card, **settings)
    narrowed = tuple(sum(getattr(t, name) for t in model.narrowing) for name in ("n_overflow", "n_flushed"))
    passes = _Passes(narrowed=narrowed)
    try:
        first = model(input_ids)
        passes.logits = first.logits
        if bool(first.logits[:, -1].isfinite().all()):
            model(first.logits[:, -1:].argmax(-1), cache=first.cache)
    except BackendError as error:
        if card.title + CAN_RUN in str(error):  # of a backend that was named: no fault of the card
            text = f"{error}; leave it to the automatic choice: the report then names it for the card"
            raise BackendError(text) from None
        passes.error = str(error)
    passes.attestation, passes.seen = model.kernels.attestation(), model.kernels.rehearsed
    passes.calls = model.kernels.calls
    return passes


def _detour(
    checkpoint: str | Path, card: Card, dtype: str, input_ids: Tensor, settings: dict
) -> _Passes | None:
    """The passes with each backend that fails replaced by the next; None where that ends as well."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BackendWarning)  # the report tells what was replaced
        passes = _under_limits(checkpoint, card, dtype, input_ids, {**settings, "strict": False})
    return passes if passes.error is None and any(row.replaced for row in passes.attestation) else None


def _readiness(
    model: CausalLM, input_ids: Tensor, card: Card, ends: str | None, say: Callable[[str], None]
) -> tuple[Readiness, str | None]:
    """(float16 readiness under the card's limits, None); without them, and why, where nothing runs under them.

    `ends` is the error of a run under the limits that ended, None where it came through.
    """
    cause = ""
    if ends is None:
        try:
            return fp16_readiness(model, input_ids, card=card, progress=say), None
        except BackendError as error:  # a remedy may ask for a dtype that the model itself never needed
            cause = f" ({_brief(str(error))})"
    say("float16 without the card's limits, under which its run ends")
    why = f"float16 was judged with this machine's arithmetic: under the card's limits the run ends{cause}"
    return fp16_readiness(model, input_ids, progress=say), why


def _as_stored(checkpoint: str | Path, settings: dict) -> CausalLM:
    """The checkpoint as its files hold it, on this machine, the backends that the user named left to their ops."""
    free = {name: settings[name] for name in ("router_dtype", "device", "expert_layout", "policy")}
    return load(checkpoint, **free)


def _stored(checkpoint: str | Path) -> str:
    """The dtype that most bytes of the files are in."""
    from workbench.checkpoint.read import FLOAT_DTYPES, plan_from_headers

    held: dict[str, int] = {}
    for sources in plan_from_headers(checkpoint).sources.values():
        for tensor in sources:
            held[tensor.dtype] = held.get(tensor.dtype, 0) + tensor.n_bytes
    return str(FLOAT_DTYPES[max(held, key=held.__getitem__)]).removeprefix("torch.")


@torch.inference_mode()
def _accuracy(
    checkpoint: str | Path, input_ids: Tensor, logits: Tensor, settings: dict
) -> tuple[dict[str, float | int | None], bool]:
    """(what the card's arithmetic does to the logits beside float32's, whether float32 is finite)."""
    free = {name: settings[name] for name in ("router_dtype", "device", "expert_layout", "policy")}
    wide = load(checkpoint, dtype="float32", **free)(input_ids, use_cache=False).logits
    positions = input_ids.shape[1]
    if not bool(wide.isfinite().all()):
        return {"card": None, "as_stored": None, "same_token": None, "positions": positions}, False
    stored = _as_stored(checkpoint, settings)(input_ids, use_cache=False).logits
    same = int((logits.argmax(-1) == wide.argmax(-1)).sum()) if bool(logits.isfinite().all()) else None
    return {
        "card": logit_difference(logits, wide), "as_stored": logit_difference(stored, wide), "same_token": same,
        "same_token_as_stored": int((stored.argmax(-1) == wide.argmax(-1)).sum()), "positions": positions,
    }, True  # fmt: skip


# ---- tables


def _ops(card: Card, rows: Sequence[Attestation]) -> pd.DataFrame:
    """What served, and what would come before it on the card if this machine could run it."""
    found = []
    for row in rows:
        ahead = [name for name, reason in row.refused if reason.startswith(card.title + CAN_RUN)]
        rule, why = card.rule(row.op, row.dtype), row.reason
        if ahead:
            why = f"the card can run it, this machine cannot; here: {row.reason}"
        if row.replaced:
            why += "; took the place of " + "; ".join(f"{name}, which {error}" for name, error in row.replaced)
        if rule is not None and not row.routed:
            ahead.insert(0, rule.to if rule.outcome == "route" else rule.library)
            why = f"rule of the card: {rule.why}; here: {row.reason}"
        found.append((
            row.op, row.tokens, row.backend, row.calls, row.dtype, ahead[0] if ahead else row.backend, why,
            "; ".join(f"{name}: {reason}" for name, reason in row.refused), row.routed, row.cast,
        ))  # fmt: skip
    return pd.DataFrame(found, columns=list(OP_COLUMNS))


def _named(calls: Sequence[Call]) -> pd.DataFrame:
    """What the card's limits say to the backends that no automatic order has, for the calls that were made."""
    found: dict[tuple[str, str], str | None] = {}
    for call in calls:
        operation = operation_named(call.op)
        ordered = operation.automatic_order(call)
        for name, backend in operation.backends.items():
            if name not in ordered and backend.requires.symbols:  # of a library
                reason = backend.requires.lack(call) or backend.supports(call)
                if reason is None or (call.op, name) not in found:
                    found[call.op, name] = reason
    rows = [(op, name, reason is None, reason or "") for (op, name), reason in sorted(found.items())]
    return pd.DataFrame(rows, columns=list(NAMED_COLUMNS))


def _products(card: Card, seen: Sequence[Seen]) -> pd.DataFrame:
    rows = []
    for row in seen:
        factor, _ = card.slowdown(row.to if row.outcome == "cast" else row.dtype, row.rule)
        # Attention in one operator has another name on each device.
        primitive = "attention" if row.primitive in ATTENTION else row.primitive.partition("::")[2]
        rows.append((
            row.op, primitive, row.dtype, row.outcome, row.library, row.to or "", row.calls,
            row.flops, math.nan if factor is None else factor, row.overflowed, row.flushed, row.cast_overflowed,
            row.cast_flushed, "" if row.rule is None else row.rule.why,
        ))  # fmt: skip
    return pd.DataFrame(rows, columns=list(PRODUCT_COLUMNS))


def _dtypes_of(products: pd.DataFrame) -> dict[str, str]:
    """Op -> the dtype that most of its flops were computed in."""
    computed = products.assign(dtype=[
        row.to if row.outcome == "cast" else row.dtype for row in products.itertuples()
    ])  # fmt: skip
    sums = computed.groupby(["op", "dtype"])["flops"].sum()
    return {op: part.droplevel(0).idxmax() for op, part in sums.groupby(level=0)}


def _costs(
    config: ModelConfig, card: Card, dtype: str, products: pd.DataFrame, prefill: int
) -> tuple[pd.DataFrame, dict[str, tuple[float | None, float | None]]]:
    """(COST_COLUMNS, phase -> least seconds as it ran and in the card's model dtype throughout)."""
    ran_in = _dtypes_of(products) if len(products) else RULE_DTYPE
    rows: list[tuple] = []
    totals: dict[str, tuple[float | None, float | None]] = {}
    for phase, settings in (
        (f"prompt of {prefill:,} tokens", {"tokens": prefill}),
        (f"one token after {prefill:,}", {"tokens": 1, "context": prefill}),
    ):
        base = op_costs(config, dtype=dtype, delta_dtype=dtype, **settings)
        ran = [_as_run(cost, card, ran_in.get(cost.op, cost.dtype), dtype) for cost in base]
        totals[phase] = total_seconds([cost for cost, *_ in ran], card), total_seconds(base, card)
        whole = totals[phase][0]
        for cost, before, factor, how in ran:
            seconds, bound = cost.seconds(card)
            share = math.nan if seconds is None or not whole else seconds / whole
            rows.append((
                phase, cost.part, cost.op, cost.dtype, cost.calls, cost.flops, cost.bytes,
                math.nan if seconds is None else seconds, share, bound, math.nan if before is None else before,
                math.nan if factor is None else factor, how,
            ))  # fmt: skip
    return pd.DataFrame(rows, columns=list(COST_COLUMNS)), totals


def _as_run(cost: OpCost, card: Card, dtype: str, asked: str) -> tuple[OpCost, float | None, float | None, str]:
    """(the cost in the dtype that it ran in, seconds in the one asked for, times longer, how that is known)."""
    before = cost.seconds(card)[0]
    if dtype == asked:
        return cost, before, None, ""
    price = price_of(cost, card, dtype, card.rule(MATMUL, dtype))
    factor = None if price.seconds is None or not before else price.seconds / before
    return price.moved, before, factor, price.how


# ---- words


def _verdict(
    card: Card, dtype: str, ran: _Passes, plain: _Passes | None, detour: _Passes | None, plan: MemoryPlan,
    readiness: Readiness | None, aside: str | None, accuracy: dict | None, products: pd.DataFrame, finite_wide: bool,
) -> Verdict:  # fmt: skip
    evidence = [plan.in_words()]
    evidence += _accuracy_sentences(card, dtype, accuracy)
    routed = products[products["outcome"] == "route"]
    if len(routed):
        ops = ", ".join(dict.fromkeys(routed["op"]))
        evidence.append(
            f"rules of the card: {counted(int(routed['calls'].sum()), 'product')} of {ops} routed to another library, "
            f"of {int(products['calls'].sum()):,} in this run"
        )
    if aside is not None:
        evidence.append(aside)
    if readiness is not None:
        evidence.append(readiness.verdict.verdict)
    if ran.error is not None:
        asked = "" if plain is None else " as asked"
        fix = "leave --backend and --policy to the automatic choice: that run ends well under the same limits"
        if detour is not None:
            fix = f"--backend {_named_instead(detour)}: that run ends well under the same limits"
        elif plain is None or plain.error is not None:
            fix = None
        evidence += [ran.error] if _brief(ran.error) != ran.error else []
        return Verdict(
            f"Does not run on {card.title}{asked}: {_brief(ran.error)}", Where(op=_op_in(ran.error)), CANNOT_RUN,
            tuple(evidence),
            fix=fix,
        )  # fmt: skip
    if plan.fits is False:
        return replace(_plan_verdict(card, dtype, plan), evidence=tuple(evidence))
    if not finite_wide:
        return Verdict(
            "Not finite on the card, and not in float32 either: the card is not what is at fault", Where(), NOT_FINITE,
            tuple(evidence), fix="find the cause in float32 first: workbench trace --dtype float32",
        )  # fmt: skip
    if readiness is not None and readiness.verdict.is_fault:
        inner = readiness.verdict
        sentence = f"On {card.title}: {inner.verdict[:1].lower()}{inner.verdict[1:]}"
        return replace(inner, verdict=sentence, evidence=(*evidence[:-1], *inner.evidence))
    if ran.logits is not None and not bool(ran.logits.isfinite().all()):
        return Verdict(
            f"Runs on {card.title}, but its logits are not finite in {dtype}", Where(), NOT_FINITE, tuple(evidence),
            fix=f"find the op: workbench trace --card {card.name} --dtype {dtype}",
        )  # fmt: skip
    unknown = "" if plan.fits is not None else "; whether it fits is not known"
    return Verdict(f"Runs on {card.title} in {dtype}: every op is served within the limits of its profile{unknown}",
                   evidence=tuple(evidence), confidence="likely")  # fmt: skip


def _plan_verdict(card: Card, dtype: str, plan: MemoryPlan) -> Verdict:
    """Of the memory alone."""
    evidence = (plan.in_words(),)
    asked = f"{counted(plan.sequences, 'sequence')} of {plan.length:,} tokens"
    if plan.fits is None:
        return Verdict(f"Whether it fits {card.title} is not known", evidence=evidence, confidence=NOT_ESTABLISHED)
    if plan.fits:
        return Verdict(f"Fits {card.title} in {dtype}: {asked} need {size_text(plan.needed)} of "
                       f"{size_text(plan.usable)} that can be used", evidence=evidence)  # fmt: skip
    what = (
        f"its weights alone take {size_text(plan.weights)}" if plan.free < 0
        else f"{asked} need {size_text(plan.needed)}"
    )  # fmt: skip
    return Verdict(
        f"Does not fit {card.title}: {what} in {dtype}, {size_text(plan.usable)} of the card can be used", Where(),
        DOES_NOT_FIT, evidence, fix=_memory_change(plan).what,
    )  # fmt: skip


def _brief(error: str) -> str:
    """An error without what a call was given and what to do next."""
    return error.partition("; given ")[0]


def _op_in(error: str) -> str | None:
    """The op of an error that begins with it."""
    return error.removeprefix("op ").partition(":")[0] if error.startswith("op ") else None


def _accuracy_sentences(card: Card, dtype: str, accuracy: dict | None) -> list[str]:
    if accuracy is None:
        return []
    if accuracy["card"] is None:
        return ["logits: float32 is not finite on this prompt"]
    if not math.isfinite(accuracy["card"]):
        return [f"logits: not finite under the card's limits in {dtype}"]
    return [
        f"logits: off by {accuracy['card']:.2g} of the largest from float32's under the card's limits in {dtype} "
        f"({accuracy['as_stored']:.2g} as stored); the likeliest token is the same at {accuracy['same_token']} of "
        f"{accuracy['positions']} positions ({accuracy['same_token_as_stored']} as stored)"
    ]


def _memory_change(plan: MemoryPlan) -> Change:
    """What makes it fit."""
    if plan.free < 0:
        cards = math.ceil((plan.weights + plan.working) / plan.usable)
        bits = 16 * (plan.usable - plan.working) / plan.weights
        return Change(
            f"split the weights over at least {cards} cards, or hold them in {max(0, math.floor(bits * 10) / 10)} bits "
            "a weight or less",
            f"weights and a pass need {size_text(plan.weights + plan.working)}, {size_text(plan.usable)} can be used",
            "not counted here: this workbench neither splits nor quantises", must=True,
        )  # fmt: skip
    if plan.longest >= plan.length and plan.most_sequences:
        what = f"at most {plan.most_sequences:,} sequences of {plan.length:,} tokens"
    else:
        what = f"a context of at most {plan.longest:,} tokens for one sequence"
    return Change(f"plan for {what}", f"what was asked for needs {size_text(plan.needed)} of {size_text(plan.usable)}",
                  "requests wait, or are cut", must=True)  # fmt: skip


def _changes(
    card: Card, dtype: str, stored: str, ran: _Passes, plain: _Passes | None, detour: _Passes | None,
    plan: MemoryPlan, readiness: Readiness | None, accuracy: dict | None, ops: pd.DataFrame, products: pd.DataFrame,
    costs: pd.DataFrame,
) -> tuple[Change, ...]:  # fmt: skip
    changes: list[Change] = []
    if ran.error is not None and plain is not None and plain.error is None:
        changes.append(Change("leave --backend and --policy to the automatic choice", ran.error,
                              "none: proven by a run under the same limits", must=True))  # fmt: skip
    elif detour is not None:
        changes += _detour_changes(detour)
    elif ran.error is not None:
        ends = ran.error if plain is None else plain.error
        changes.append(Change(
            f"find another way for {_op_in(ends) or 'the op that ends the run'}: another backend or policy "
            "(`workbench backends` lists them), or a rule of the card that routes or casts what it cannot take",
            _brief(ends), "unknown: nothing runs until then", must=True,
        ))  # fmt: skip
    if plan.fits is False:
        changes.append(_memory_change(plan))
    if dtype != stored:
        changes.append(_dtype_change(card, dtype, stored, ran, accuracy))
    if readiness is not None and readiness.verdict.is_fault:
        changes.append(_remedy(readiness))
    changes += _lack_changes(card, ops, products) if detour is None else []
    changes += _route_changes(card, products, costs)
    changes += _primitive_changes(card, ran, plain, detour)
    if card.absent_modules:
        changes.append(Change(
            f"look for {', '.join(card.absent_modules)} in the image at hand (`workbench probe`)",
            "; ".join(dict.fromkeys(card.absent_modules.values())),
            "unknown: without them the ops run on torch's kernels, as they did here",
        ))  # fmt: skip
    return tuple(changes)


def _named_instead(detour: _Passes) -> str:
    """What names the backends that took the place of others, as --backend has it."""
    return ",".join(dict.fromkeys(f"{row.op}={row.backend}" for row in detour.attestation if row.replaced))


def _detour_changes(detour: _Passes) -> list[Change]:
    """Each backend that failed under the limits, and the one that a run proved in its place."""
    found: dict[tuple[str, str, str], str] = {}
    for row in detour.attestation:
        for name, error in row.replaced:
            found.setdefault((row.op, row.backend, name), error)
    cost = "proven by a run under the same limits; its time there is not known"
    return [
        Change(f"--backend {op}={instead}, in the place of {name}",
               _brief(error.removeprefix("failed twice at call: ")), cost, must=True)
        for (op, instead, name), error in found.items()
    ]  # fmt: skip


def _dtype_change(card: Card, dtype: str, stored: str, ran: _Passes | None, accuracy: dict | None) -> Change:
    """Loading in another dtype; without a run its cost is not known."""
    is_needed = stored not in card.native_matmul
    why = f"the card runs models in {card.model_dtype}; the files hold {stored}"
    why += ", whose products its profile does not have" if is_needed else ""
    cost = f"unknown without a run; `workbench inspect --dtype {dtype}` counts the weights that are lost"
    if ran is not None:
        over, flushed = ran.narrowed
        cost = f"{over:,} weights overflow and {flushed:,} become zero on load"
        if accuracy is not None and accuracy["card"] and math.isfinite(accuracy["card"]):
            cost += f"; logits off by {accuracy['card']:.2g} of the largest ({accuracy['as_stored']:.2g} as stored)"
    return Change(f"load it in {dtype} (--dtype {dtype})", why, cost, must=is_needed)


def _remedy(readiness: Readiness) -> Change:
    tried = readiness.remedies
    serves = tried[tried["serves"].astype(bool)]
    if readiness.remedy is None or serves.empty:
        return Change("no remedy for float16 was proven: run it in float32 on another card",
                      readiness.verdict.verdict, "unknown", must=True)  # fmt: skip
    row = serves.iloc[0]
    cost = (
        f"{size_text(row['extra_bytes'])} more, {int(row['wide_flops']):,} flops a token in float32; proven by a rerun "
        f"in float16, logits off by {row['same_experts']:.2g} of the largest"
    )
    return Change(f"{row['remedy']}: {row['changes']}", readiness.verdict.verdict, cost, must=True)


def _lack_changes(card: Card, ops: pd.DataFrame, products: pd.DataFrame) -> list[Change]:
    """Ops that another backend serves because the first needs what the card lacks."""
    changes = []
    for row in ops.drop_duplicates(["op", "backend", "refused"]).itertuples():
        lacking = [p for name, p in card.absent_primitives.items() if name in row.refused]
        if lacking:
            calls = int(products.loc[products["op"] == row.op, "calls"].sum())
            changes.append(Change(
                f"use {lacking[0].instead}; {row.backend} serves {row.op} until then", row.refused,
                f"unknown on the card; {counted(calls, 'product')} of {row.op} in this run",
            ))  # fmt: skip
    return changes


def _primitive_changes(
    card: Card, ran: _Passes, plain: _Passes | None, detour: _Passes | None
) -> list[Change]:
    """For each missing library what to use instead of its operators; first that of the operator that ended the run."""
    ends = ran.error if plain is None else plain.error
    changes = []
    for library in dict.fromkeys(p.library for p in card.absent_primitives.values()):
        lacking = [p for p in card.absent_primitives.values() if p.library == library]
        at_fault = [p for p in lacking if ends is not None and f"{p.name}, called by" in ends]
        first = (at_fault or lacking)[0]
        why = f"{counted(len(lacking), 'operator')} of torch {'raises' if len(lacking) == 1 else 'raise'} there"
        if at_fault and detour is not None:
            cost = f"nothing beside --backend {_named_instead(detour)}, which needs none of them"
        elif at_fault:
            cost = f"unknown: the run ended at {first.name}"
        elif ends is not None and detour is None:
            cost = "unknown: the run ended before it could show whether they are needed"
        else:
            why += "" if ran.error is not None else "; the rehearsal called none of them"
            cost = "nothing for the backends that ran, which need none of them"
        what = f"do without {library}; in the place of {first.name.removeprefix('aten::')}: {first.instead}"
        changes.append(Change(what, why, cost, must=bool(at_fault)))
    return sorted(changes, key=lambda change: not change.must)


def _route_changes(card: Card, products: pd.DataFrame, costs: pd.DataFrame) -> list[Change]:
    """What products that were routed or cast cost, op by op."""
    changes = []
    moved = products[products["outcome"] != "run"]
    for (op, dtype, outcome, to), part in moved.groupby(["op", "dtype", "outcome", "to"], sort=False):
        rule = card.rule(MATMUL, dtype)
        prices = []
        for phase, rows in costs[costs["op"] == op].groupby("phase", sort=False):
            ran, before = (rows[name].sum(min_count=1) for name in ("seconds", "in_model_dtype"))
            if ran == ran and before == before:
                instead = (
                    f"no longer than in {card.model_dtype}, memory bounds both" if ran <= before
                    else f"{duration_text(before)} in {card.model_dtype}"
                )  # fmt: skip
                share = rows["share"].sum()
                prices.append(f"{phase}: at least {duration_text(ran)}, {share:.0%} of the pass ({instead})")
        factor = part["factor"].dropna()
        rate = f"{factor.iloc[0]:.3g} times the time by the peak rates" if len(factor) else "its rate is unknown"
        calls = int(part["calls"].sum())
        if outcome == "route":
            what = f"let {to} compute the {dtype} products of {op} ({calls:,} in this run), not {rule.library}"
            if op == "gated_delta_rule":
                what += "; its state, gates and their sums stay in float32"
        else:
            over, flushed = (int(part[name].sum()) for name in ("cast_overflowed", "cast_flushed"))
            what = (
                f"cast the {dtype} operands of {op} to {to} before its products ({calls:,} in this run): {over:,} "
                f"values overflowed, {flushed:,} became zero"
            )
        changes.append(Change(what, rule.why, "; ".join([rate, *prices])))
    return changes
