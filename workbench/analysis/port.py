"""What is left to do before a card computes a model well: each op missing, wrong, slow, unproven or right.

    board = port_board(ModelConfig.from_file("config.json"), card_named("bi-v100"))
    board.rows[0].op, board.rows[0].state, board.rows[0].todo

Ops are ranked by their share of the least time of one request, a prompt and the tokens that follow it
(`costs`: the larger of flops over rate and bytes over bandwidth, by the card's profile). What is measured, on this
machine, and what is priced, from the profile, is said of every figure.

States, of the kernel that would be taken for an op:

    missing   no kernel but the arbiter's or one put together from torch's operators can serve it there
    wrong     it fails the conformance checks that could be made here
    slow      it passes, and takes more than `multiple` times the least time
    unproven  a library has one that the card's profile does not rule out, and this machine cannot run it
    right     it passes, and its time is within the multiple
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from workbench.analysis.costs import WIDTH, OpCost, op_costs, price_of
from workbench.cards import Card
from workbench.config import ModelConfig
from workbench.errors import BackendError, InputError, one_line
from workbench.kernels import Kernels
from workbench.kernels.alignment import torch_sort as sorted_pairs
from workbench.kernels.conformance import CONTRACTS, FAILED, PASSED, Conformance, conform
from workbench.kernels.experts.spec import Chain
from workbench.kernels.machine import Machine, rehearsed_machine, this_machine
from workbench.kernels.registry import OPERATIONS, Backend, Call, resolve
from workbench.kernels.rehearsal import MATMUL
from workbench.numerics import resolve_policy

MISSING, WRONG, SLOW, UNPROVEN, RIGHT = "missing", "wrong", "slow", "unproven", "right"
#: From the one that keeps most from working to the one that keeps nothing.
STATES = (WRONG, MISSING, SLOW, UNPROVEN, RIGHT)

#: Backends of torch that hand the whole work, or its products, to one kernel of a library made for the device.
ONE_KERNEL = frozenset({"torch_linear", "torch_sdpa", "torch_onednn", "torch_depthwise", "torch_grouped"})

#: A request: tokens of the prompt, tokens that follow, and how many times its least time an op may take.
PROMPT, FOLLOWING, MULTIPLE = 2048, 256, 3.0

PREFILL, DECODE = "prefill", "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of the model in one phase: its calls in one pass, their least time there, and the time that is known.

    backend   the kernel that would be taken; None: none can serve
    least     seconds on the card by its figures; None: a figure is unknown
    seconds   of the backend; None: neither measured nor priced
    how       ``measured ...``, ``priced: ...`` or why there is no time
    launches  operators that it runs for one call, where they could be counted
    """

    name: str
    phase: str
    calls: int
    backend: str | None
    least: float | None
    bound: str
    seconds: float | None
    how: str
    launches: int | None = None

    @property
    def ratio(self) -> float | None:
        return None if self.seconds is None or not self.least else self.seconds / self.least


@dataclass(frozen=True, slots=True, kw_only=True)
class PortRow:
    """One op.

    share, prefill, decode  of the least time of the request and of its two phases, or, where the card's figures give
               none, of the measured one; None where neither is known
    backend    the kernel that would be taken where most of the time goes, empty where the op is missing
    kind       ``library``, ``one kernel`` or ``composed`` of torch's operators; empty for none
    meanwhile  what serves as long as there is nothing better, empty for nothing
    checked    what conformance said of the kernel, and where it ran
    libraries  (name, why the card cannot run it, or what this machine knows of it) of every library that has the op
    todo       the next step
    """

    op: str
    state: str
    share: float | None
    prefill: float | None
    decode: float | None
    backend: str
    kind: str
    meanwhile: str
    checked: str
    failure: str
    libraries: tuple[tuple[str, str], ...]
    parts: tuple[Part, ...]
    todo: str

    @property
    def worst(self) -> Part | None:
        """The part that is furthest from its least time."""
        known = [part for part in self.parts if part.ratio is not None]
        return max(known, key=lambda part: part.ratio, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """The table, ranked, and what it rests on. `others` are (op, share) of what is no op of the registry."""

    card: Card
    model: str
    dtype: str
    prompt: int
    following: int
    multiple: float
    device: str | None
    machine: str
    least: float | None
    rows: tuple[PortRow, ...]
    others: tuple[tuple[str, float | None], ...] = ()
    notes: tuple[str, ...] = field(default=())

    def counts(self) -> dict[str, int]:
        """state -> ops."""
        return {state: sum(row.state == state for row in self.rows) for state in STATES}

    @property
    def is_fault(self) -> bool:
        """Whether an op would be computed wrongly, or by nothing but the arbiter."""
        return any(row.state == WRONG or (row.state == MISSING and not row.meanwhile) for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        rows = []
        for row in self.rows:
            parts = [{name: getattr(part, name) for name in part.__slots__} | {"ratio": part.ratio}
                     for part in row.parts]  # fmt: skip
            rows.append({name: getattr(row, name) for name in row.__slots__} | {
                "libraries": [list(pair) for pair in row.libraries], "parts": parts,
            })  # fmt: skip
        return {
            "card": self.card.name, "title": self.card.title, "model": self.model, "dtype": self.dtype,
            "prompt": self.prompt, "following": self.following, "multiple": self.multiple, "device": self.device,
            "machine": self.machine, "least_seconds": self.least, "counts": self.counts(), "rows": rows,
            "others": [list(pair) for pair in self.others], "notes": list(self.notes),
        }  # fmt: skip


#: seconds of one call of a function, measured on a device.
Measure = Callable[[Callable[[], object], str], float]


def port_board(
    config: ModelConfig, card: Card, *, model: str = "config", dtype: str | None = None, prompt: int = PROMPT,
    following: int = FOLLOWING, multiple: float = MULTIPLE, device: str | None = None, measure: Measure | None = None,
    progress: Callable[[str], None] = lambda _line: None,
) -> Board:  # fmt: skip
    """The board of a model on a card.

    `dtype` that of the model there (the card's `model_dtype` if None). With `device`, which must be a device of this
    very card, backends are checked and timed there by `measure`; without, they are checked on this machine's CPU and
    priced. Raises InputError for sizes below 1, an unknown dtype, and a device that is not the card's.
    """
    dtype = dtype or card.model_dtype
    if dtype not in WIDTH:
        raise InputError(f"port: dtype: expected one of {', '.join(WIDTH)}, found {dtype!r}")
    if following < 1 or not multiple > 0:
        raise InputError(f"port: expected at least one token that follows and a multiple above 0, found {following} "
                         f"and {multiple}")  # fmt: skip
    if device is not None:
        _check_device(card, device)
    passes = {
        PREFILL: (1, {"tokens": prompt}), DECODE: (following, {"tokens": 1, "context": prompt + following // 2}),
    }  # fmt: skip
    costs = {
        phase: op_costs(config, dtype=dtype, delta_dtype="float32", **sizes) for phase, (_, sizes) in passes.items()
    }
    totals = _totals(card, costs, {phase: times for phase, (times, _) in passes.items()})
    known = [total for total in totals.values() if total is not None]
    whole = sum(known) if len(known) == len(totals) and totals else None
    examiner = _Examiner(config, card, dtype, passes, multiple, device, measure, progress)
    ops = list(dict.fromkeys(cost.op for parts in costs.values() for cost in parts))
    shares = {op: _shares(op, totals, passes, whole) for op in ops}
    rows = [examiner.row(op, costs, shares[op]) for op in ops if op in OPERATIONS]
    if whole is None:
        rows = _by_measured(rows, {phase: times for phase, (times, _) in passes.items()})
    rows.sort(key=lambda row: (-(row.share or 0.0), STATES.index(row.state), row.op))
    others = [(op, shares[op][0]) for op in ops if op not in OPERATIONS]
    return Board(
        card=card, model=model, dtype=dtype, prompt=prompt, following=following, multiple=multiple, device=device,
        machine=this_machine((device or "cpu").split(":")[0]).name, least=whole, rows=tuple(rows),
        others=tuple(sorted(others, key=lambda pair: -(pair[1] or 0.0))), notes=_notes(card, device, whole),
    )  # fmt: skip


def _by_measured(rows: list[PortRow], times: Mapping[str, int]) -> list[PortRow]:
    """Shares of the times that were measured, where the card's figures give none; as they are where one is missing."""
    if any(part.seconds is None for row in rows for part in row.parts):
        return rows
    spent = [
        {phase: sum(part.seconds for part in row.parts if part.phase == phase) for phase in times} for row in rows
    ]
    whole = {phase: sum(one[phase] for one in spent) for phase in times}
    total = sum(times[phase] * whole[phase] for phase in times)
    return [
        replace(row, share=sum(times[p] * one[p] for p in times) / total, prefill=one[PREFILL] / whole[PREFILL],
                decode=one[DECODE] / whole[DECODE])
        for row, one in zip(rows, spent, strict=True)
    ]  # fmt: skip


def _check_device(card: Card, device: str) -> None:
    """Times of one card under the name of another would mislead."""
    machine = this_machine(device.split(":")[0])
    if machine.device != card.device:
        raise InputError(f"port: --device {device}: card {card.name} is a {card.device} device; leave it out to price")
    if machine.device == "cuda" and machine.capability is None:
        raise InputError(f"port: --device {device}: this machine has no CUDA device; leave it out to price")
    if card.capability is not None and machine.capability != card.capability:
        found, wanted = (".".join(map(str, c)) for c in (machine.capability, card.capability))
        raise InputError(
            f"port: --device {device}: expected {card.title} of compute capability {wanted}, found {machine.name} of "
            f"{found}; leave --device out to price"
        )


def _notes(card: Card, device: str | None, whole: float | None) -> tuple[str, ...]:
    notes = [
        "Least times are the larger of flops over rate and bytes over bandwidth, by the card's profile; launches, "
        "conversions and what a kernel reads twice are not in them.",
    ]
    if device is None:
        notes.append(
            "Nothing was measured on the card. Conformance ran on this machine's CPU in the dtype of the model: it "
            "proves the formula of a backend of torch and not the kernels that the card has for torch's operators."
        )
        notes.append(
            "The price of what is composed of torch's operators takes each of them as a kernel that reads its "
            "operands from memory and writes its result there once. Launches add to that, and what a cache keeps takes "
            "from it: an estimate, to be measured on the card."
        )
    if whole is None:
        missing = ", ".join(f"{figure} ({why})" for figure, why in card.unknown.items())
        notes.append(
            f"The card's profile lacks figures: there is no least time to rank by, and whether an op is slow is not "
            f"known. {missing}."
        )
    return tuple(notes)


def _totals(card: Card, costs: Mapping[str, Iterable[OpCost]], times: Mapping[str, int]) -> dict[tuple[str, str], Any]:
    """(phase, op) -> least seconds of the request; None where a figure is unknown."""
    totals: dict[tuple[str, str], Any] = {}
    for phase, parts in costs.items():
        for cost in parts:
            key, seconds = (phase, cost.op), cost.seconds(card)[0]
            before = totals.get(key, 0.0)
            totals[key] = None if seconds is None or before is None else before + times[phase] * seconds
    return totals


def _shares(op: str, totals: Mapping, passes: Mapping, whole: float | None) -> tuple[Any, Any, Any]:
    """Of the request, of the prefill, of the decode; None where unknown."""
    if not whole:
        return None, None, None
    by_phase = [sum(v for (p, _), v in totals.items() if p == phase) for phase in passes]
    own = [totals.get((phase, op), 0.0) for phase in passes]
    prefill, decode = (x / total if total else None for x, total in zip(own, by_phase, strict=True))
    return sum(own) / whole, prefill, decode


class _Examiner:
    """Finds, checks and times the kernel of each op."""

    def __init__(
        self, config: ModelConfig, card: Card, dtype: str, passes: Mapping[str, tuple[int, dict[str, int]]],
        multiple: float, device: str | None, measure: Measure | None, progress: Callable[[str], None],
    ):  # fmt: skip
        self.config, self.card, self.dtype, self.passes = config, card, dtype, passes
        self.multiple, self.device, self.measure, self.progress = multiple, device, measure, progress
        self.here = device or "cpu"
        self.is_card = device is not None
        self.machine: Machine = this_machine(device.split(":")[0]) if device else rehearsed_machine(card)
        self.policy = Kernels().policy
        self.conformances: dict[tuple[str, str], Conformance] = {}

    def row(self, op: str, costs: Mapping[str, Iterable[OpCost]], shares: tuple[Any, Any, Any]) -> PortRow:
        self.progress(f"{op}: backends, conformance, {'times' if self.is_card else 'prices'}")
        libraries = self._libraries(op)
        mine = [(phase, cost) for phase, parts in costs.items() for cost in parts if cost.op == op]
        dearest = max(mine, key=lambda one: self.passes[one[0]][0] * (one[1].seconds(self.card)[0] or 0.0))
        ours = [self._automatic(op, phase, cost) for phase, cost in mine]
        serving = {b.name: b for b in ours if isinstance(b, Backend)}
        taken, proven, library = self._taken(op, ours[mine.index(dearest)], libraries)
        kind = "" if taken is None else self._kind(taken)
        # What a library's kernel takes is known where it runs; elsewhere the time is that of what serves meanwhile.
        parts = tuple(self._part(op, phase, cost, library if self.is_card else None) for phase, cost in mine)
        judged = () if taken is None or not proven else (taken.name,) if library else tuple(serving)
        checked, failure = self._checked(op, judged, taken)
        state = self._state(taken, kind, proven, failure, parts)
        serving.pop("reference", None)
        meanwhile = ", ".join(serving) if state in (MISSING, UNPROVEN) else ""
        reasons = tuple((name, why or self._of_library(op, name)) for name, why in libraries.items())
        return PortRow(
            op=op, state=state, share=shares[0], prefill=shares[1], decode=shares[2],
            backend="" if taken is None or state == MISSING else taken.name, kind=kind, meanwhile=meanwhile,
            checked=checked, failure=failure, libraries=reasons, parts=parts,
            todo=_todo(op, state, taken, reasons, meanwhile, self.card),
        )  # fmt: skip

    # ---- who serves

    def _call(self, op: str, phase: str, name: str) -> Call:
        """What is known of a call of a part of the model there."""
        arguments = self._arguments(op, phase, name, "meta")
        first = next(x for x in arguments.values() if isinstance(x, Tensor))
        tokens = {"linear": first.numel() // first.shape[-1], "routing": first.shape[0], "experts": first.shape[0]}
        matrix = {"linear": "weight", "experts": "gate_up"}.get(op)
        shape = () if matrix is None else tuple(arguments[matrix].shape)
        return Call(op, self.machine.device, getattr(torch, self.dtype), tokens.get(op, first.shape[1]), False, False,
                    self.policy, shape, self.machine, self.here.split(":")[0])  # fmt: skip

    def _libraries(self, op: str) -> dict[str, str]:
        """Library backends of an op -> why the card cannot run one, empty where nothing that is known says so."""
        name = next(name for name, (o, *_) in self._sizes(PREFILL).items() if o == op)
        calls = [self._call(op, phase, name) for phase in self.passes]
        found = {}
        for backend in OPERATIONS[op].backends.values():
            if not backend.name.startswith("torch_") and backend.name != "reference":
                policy = self.policy if backend.policy is None else resolve_policy(backend.policy)
                own = [replace(call, policy=policy) for call in calls]  # as whoever names it has
                reasons = [backend.requires.lack(call) or backend.supports(call) for call in own]
                if None in reasons:  # one phase is enough
                    found[backend.name] = self._doubt(backend)
                else:
                    found[backend.name] = "; ".join(dict.fromkeys(filter(None, reasons)))
        return found

    def _doubt(self, backend: Backend) -> str:
        """Why the profile gives no reason to expect that a library works there; empty where it does.

        One that it names may; any other needs a compute capability to be judged by.
        """
        named = {rule.library for rule in self.card.rules}
        named |= {name.partition(":")[0].partition(".")[0] for name in self.card.absent_modules}
        roots = {symbol.partition(":")[0].partition(".")[0] for symbol in backend.requires.symbols}
        if self.is_card or self.card.capability is not None or named & {backend.name, *roots}:
            return ""
        return f"not known to work there: {self.card.name}'s profile has no compute capability and does not name it"

    def _of_library(self, op: str, name: str) -> str:
        """What this machine knows of a library's kernel that the card could run."""
        if not self.is_card:
            return f"the profile of {self.card.name} does not rule it out; it was not run"
        return self._conformance(op, name).reason or f"passes conformance on {self.here}"

    def _automatic(self, op: str, phase: str, cost: OpCost) -> Backend | str:
        """What runs where nobody names a backend, or why nothing does."""
        call = self._call(op, phase, cost.part)
        try:
            return resolve(call, None, self.card if not self.is_card else None).backend
        except BackendError as error:
            return str(error)

    def _taken(
        self, op: str, ours: Backend | str, libraries: Mapping[str, str]
    ) -> tuple[Backend | None, bool, Backend | None]:
        """(the kernel that would be taken, whether it can be run here, the library's where that is the one).

        A library that passes here comes first, then torch's one kernel, then a library that nothing rules out, then
        what is composed.
        """
        backends = OPERATIONS[op].backends
        possible = [backends[name] for name, why in libraries.items() if not why]
        if self.is_card:
            passing = [b for b in possible if self._conformance(op, b.name).outcome == PASSED]
            if passing:
                return passing[0], True, passing[0]
        if isinstance(ours, Backend) and self._kind(ours) != "composed":
            return ours, True, None
        if possible and not self.is_card:
            return possible[0], False, possible[0]
        return (ours, True, None) if isinstance(ours, Backend) else (None, False, None)

    def _kind(self, backend: Backend) -> str:
        if backend.name == "reference":
            return "arbiter"
        if not backend.name.startswith("torch_"):
            return "library"
        # On a CPU torch's operators are the library.
        return "one kernel" if backend.name in ONE_KERNEL or self.card.device == "cpu" else "composed"

    # ---- is it right

    def _conformance(self, op: str, name: str) -> Conformance:
        if (op, name) not in self.conformances:
            dtype = getattr(torch, self.dtype)
            dtypes = [dtype] if dtype in CONTRACTS[op].dtypes else None
            self.conformances[op, name] = conform(op, name, device=self.here, dtypes=dtypes)
        return self.conformances[op, name]

    def _checked(self, op: str, names: tuple[str, ...], taken: Backend | None) -> tuple[str, str]:
        """(what conformance said of each backend, the first failure in full)."""
        if not names:
            return ("not run: this machine cannot run it" if taken else ""), ""
        said, failure = [], ""
        for name in names:
            found = self._conformance(op, name)
            failure = failure or (f"{name}: {found.reason}" if found.outcome == FAILED else "")
            said.append({
                FAILED: f"{name} failed {len(found.failures)} of {len(found.rows)} checks",
                PASSED: f"{name} passed {len(found.rows)} checks",
            }.get(found.outcome, f"{name} refused every case: {found.reason}"))
        where = f"{self.machine.name}" if self.is_card else "this machine's CPU"
        return f"{', '.join(said)} in {self.dtype} on {where}", failure

    def _state(
        self, taken: Backend | None, kind: str, proven: bool, failure: str, parts: tuple[Part, ...]
    ) -> str:
        if taken is None or kind == "arbiter":
            return MISSING
        if failure:
            return WRONG
        if kind == "composed":
            return MISSING
        if not proven:
            return UNPROVEN
        return SLOW if any(p.ratio is not None and p.ratio > self.multiple for p in parts) else RIGHT

    # ---- how long does it take

    def _part(self, op: str, phase: str, cost: OpCost, library: Backend | None) -> Part:
        least, bound = cost.seconds(self.card)
        backend: Backend | str = library or self._automatic(op, phase, cost)
        if isinstance(backend, str):
            return Part(name=cost.part, phase=phase, calls=cost.calls, backend=None, least=least, bound=bound,
                        seconds=None, how=backend)  # fmt: skip
        launches: int | None = None
        if self.is_card and self.measure is not None:
            seconds, how = self._measured(op, phase, cost, backend)
        elif self._kind(backend) == "one kernel":
            seconds, how = self._priced(cost, backend)
        else:
            seconds, how, launches = self._composed(op, phase, cost, backend)
        return Part(name=cost.part, phase=phase, calls=cost.calls, backend=backend.name, least=least, bound=bound,
                    seconds=seconds, how=how, launches=launches)  # fmt: skip

    def _measured(self, op: str, phase: str, cost: OpCost, backend: Backend) -> tuple[float | None, str]:
        arguments = self._arguments(op, phase, cost.part, self.here)
        kernels = Kernels({op: backend.name})
        try:
            with torch.no_grad():
                seconds = self.measure(lambda: getattr(kernels, op)(**arguments), self.here)
        except (BackendError, RuntimeError) as error:  # out of memory among them; it is told
            return None, f"no time: {one_line(str(error))[:300]}"
        return cost.calls * seconds, f"measured on {self.machine.name}: the median of one call times {cost.calls}"

    def _priced(self, cost: OpCost, backend: Backend) -> tuple[float | None, str]:
        """One kernel at its least time in the dtype that the card's rules leave it."""
        rule = self.card.rule(cost.op, self.dtype, backend.name) or self.card.rule(MATMUL, self.dtype)
        moved = self.dtype if rule is None or rule.outcome != "cast" else rule.to
        if rule is not None and (rule.price is not None or moved != self.dtype):
            price = price_of(cost, self.card, moved, rule)
            return price.seconds, f"priced: {price.how}, by the card's rule: {rule.why}"
        seconds, bound = cost.seconds(self.card)
        return seconds, "priced: one kernel at its least time" if seconds is not None else f"no price: {bound}"

    def _composed(self, op: str, phase: str, cost: OpCost, backend: Backend) -> tuple[float | None, str, int | None]:
        """Torch's operators one by one, counted on tensors without data."""
        arguments = self._arguments(op, phase, cost.part, "meta")
        if op == "gated_delta_rule":
            arguments |= {"policy": self.policy, "tap": None}
        if op == "experts":
            arguments |= {"chain": Chain(lambda e, n, b=1: sorted_pairs.run(e, num_experts=n, block=b))}
        traffic = Traffic(self.card, self.dtype)
        try:
            with torch.no_grad(), traffic:
                backend.run(**arguments)
        except Exception as error:  # noqa: BLE001 - whatever needs values cannot be counted without; the reason is told
            return None, f"no price: its operators cannot be counted without data: {one_line(str(error))[:200]}", None
        if traffic.unknown:
            return None, f"no price: the card's {traffic.unknown} is not known", traffic.operators
        how = f"priced: {traffic.operators} operators of torch a call, each read and written once"
        return cost.calls * traffic.seconds, how, traffic.operators

    # ---- the calls of the model

    def _sizes(self, phase: str) -> dict[str, tuple]:
        """part -> (op, sizes of its operands)."""
        c, tokens = self.config, self.passes[phase][1]["tokens"]
        heads, query, key = c.linear_num_value_heads, c.num_attention_heads * c.head_dim, c.num_key_value_heads
        context = self.passes[phase][1].get("context", 0)
        sizes: dict[str, tuple] = {
            "norms": ("rms_norm", (1, tokens, c.hidden_size)),
            "gdn.in_proj": ("linear", tokens, c.hidden_size, c.conv_dim + c.value_dim + 2 * heads),
            "gdn.conv": ("causal_conv", tokens), "gdn.delta_rule": ("gated_delta_rule", tokens),
            "gdn.norm": ("gated_rms_norm", (1, tokens, heads, c.linear_value_head_dim)),
            "gdn.out_proj": ("linear", tokens, c.value_dim, c.hidden_size),
            "attn.in_proj": ("linear", tokens, c.hidden_size, 2 * query + 2 * key * c.head_dim),
            # Queries and keys in turn: the mean of both.
            "attn.norm": ("rms_norm", (1, tokens, max(1, (c.num_attention_heads + key) // 2), c.head_dim)),
            "attn.attention": ("attention", tokens, context + tokens),
            "attn.out_proj": ("linear", tokens, query, c.hidden_size),
            "lm_head": ("linear", 1, c.hidden_size, c.vocab_size),
        }  # fmt: skip
        if c.is_moe:
            shared = c.shared_expert_intermediate_size
            sizes |= {
                "moe.in_proj": ("linear", tokens, c.hidden_size, c.num_experts + 1 + 2 * shared),
                "moe.routing": ("routing", tokens), "moe.experts": ("experts", tokens),
                "moe.shared_down": ("linear", tokens, shared, c.hidden_size),
            }  # fmt: skip
        if c.intermediate_size is not None:
            sizes |= {
                "mlp.in_proj": ("linear", tokens, c.hidden_size, 2 * c.intermediate_size),
                "mlp.down_proj": ("linear", tokens, c.intermediate_size, c.hidden_size),
            }
        return sizes

    def _arguments(self, op: str, phase: str, name: str, device: str) -> dict[str, Any]:
        """Operands of one call of a part; drawn on a real device, without data on ``meta``."""
        c, (_, *sizes) = self.config, self._sizes(phase)[name]
        dtype = getattr(torch, self.dtype)

        def drawn(*shape: int, scale: float = 1.0, dtype: torch.dtype = dtype) -> Tensor:
            x = torch.empty(shape, device=device, dtype=dtype)
            return x if device == "meta" else x.normal_().mul_(scale)

        if op == "linear":
            rows, inputs, outputs = sizes
            return {"x": drawn(1, rows, inputs), "weight": drawn(outputs, inputs, scale=inputs**-0.5)}
        if op in ("rms_norm", "gated_rms_norm"):
            gate = {"gate": drawn(*sizes[0])} if op == "gated_rms_norm" else {}
            return {"x": drawn(*sizes[0]), **gate, "weight": drawn(sizes[0][-1]), "eps": c.rms_norm_eps}
        tokens = sizes[0]
        if op == "causal_conv":
            width = c.linear_conv_kernel_dim
            return {"x": drawn(1, tokens, c.conv_dim), "weight": drawn(c.conv_dim, width),
                    "window": drawn(1, width - 1, c.conv_dim)}  # fmt: skip
        if op == "attention":
            kv = (1, sizes[1], c.num_key_value_heads, c.head_dim)
            return {"q": drawn(1, tokens, c.num_attention_heads, c.head_dim), "k": drawn(*kv), "v": drawn(*kv),
                    "scale": c.head_dim**-0.5}  # fmt: skip
        if op == "routing":
            return {"logits": drawn(tokens, c.num_experts), "top_k": c.num_experts_per_tok, "normalise": True}
        if op == "experts":
            count, inner, top_k = c.num_experts, c.moe_intermediate_size, c.num_experts_per_tok
            chosen = torch.empty(tokens, top_k, dtype=torch.int64, device=device)
            if device != "meta":
                chosen = torch.rand(tokens, count, device=device).topk(top_k, dim=-1).indices
            return {
                "x": drawn(tokens, c.hidden_size), "weights": drawn(tokens, top_k), "experts": chosen,
                "gate_up": drawn(count, 2 * inner, c.hidden_size, scale=c.hidden_size**-0.5),
                "down": drawn(count, c.hidden_size, inner, scale=inner**-0.5),
            }  # fmt: skip
        key, value, heads = c.linear_key_head_dim, c.linear_value_head_dim, c.linear_num_value_heads
        unit = (1, tokens, c.linear_num_key_heads, key)
        q, k = drawn(*unit), drawn(*unit)
        gates = drawn(1, tokens, heads, dtype=torch.float32)
        if device != "meta":
            q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
            gates = -gates.abs()
        return {
            "q": q * key**-0.5, "k": k, "v": drawn(1, tokens, heads, value), "log_decay": gates,
            "beta": torch.sigmoid(drawn(1, tokens, heads)),
            "initial_state": drawn(1, heads, key, value, dtype=torch.float32),
        }  # fmt: skip


class Traffic(TorchDispatchMode):
    """Counts torch's operators and prices each: the larger of its flops over the rate and its bytes over the bandwidth.

    Bytes are those of the tensors that an operator takes and gives; a view moves nothing.
    """

    def __init__(self, card: Card, dtype: str):
        super().__init__()
        self.card, self.dtype = card, dtype
        self.operators, self.seconds, self.unknown = 0, 0.0, ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        given = list(_tensors((args, kwargs)))
        if func.is_view or func._schema.name in NO_KERNEL or not (given or list(_tensors(found))):
            return found
        self.operators += 1
        written = sum(map(_size, _tensors(found)))
        read = list(map(_size, given))
        if func._schema.name in PICKS and read:  # reads what it gives, not all that it could pick from
            read[0] = min(read[0], written)
        moved = sum(read) + written
        count = flop_registry.get(func._overloadpacket)
        flops = 0 if count is None else count(*args, **kwargs, out_val=found)
        rate = self._rate(given) if flops else None
        if self.card.bandwidth is None or (flops and rate is None):
            self.unknown = "bandwidth" if self.card.bandwidth is None else f"rate of {self.dtype} products"
            return found
        self.seconds += max(moved / self.card.bandwidth, flops / rate if rate else 0.0)
        return found

    def _rate(self, given: list[Tensor]) -> float | None:
        name = str(given[0].dtype).removeprefix("torch.")
        return self.card.rates.get(name)


#: Operators that hand out memory and launch nothing.
NO_KERNEL = frozenset({
    "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided",
    "aten::_reshape_alias", "aten::_unsafe_view", "aten::detach",
})  # fmt: skip


#: Operators that read some rows of their first operand.
PICKS = frozenset({"aten::index_select", "aten::index", "aten::gather", "aten::embedding"})


def _size(x: Tensor) -> int:
    """Bytes of a tensor; of one that is expanded, those that there are."""
    return min(x.numel() * x.element_size(), x.untyped_storage().nbytes())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _todo(
    op: str, state: str, taken: Backend | None, libraries: tuple[tuple[str, str], ...], meanwhile: str, card: Card
) -> str:
    """The next step."""
    own = f"`workbench conformance {op} --backend module:function --device {card.device}` holds it to the contract"
    if state == MISSING:
        lacking = f" ({', '.join(name for name, _ in libraries)} cannot serve)" if libraries else ""
        serves = f"; until then {meanwhile}" if meanwhile else ""
        return f"write or find a kernel for it{lacking}{serves}; {own}"
    if state == WRONG:
        return f"mend {taken.name}, or name another with --backend {op}=NAME"
    if state == UNPROVEN:
        return f"on the card: `workbench conformance {op} --backend {taken.name} --device {card.device}`"
    return f"profile {taken.name} on the card" if state == SLOW else "nothing"
