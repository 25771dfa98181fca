"""Out of memory in a forward step: memory is let go, the cache is rolled back, the step runs once more.

    recovery = Recovery(model)
    output = recovery.step(input_ids, cache=cache, last_only=True)  # as model(...), with one retry
    outcomes = serve_requests(model, [Request(prompt, max_new_tokens=40), ...], recovery=recovery)
    recovery.attestation()  # how many, in which layer and op

An allocator's failure (`is_out_of_memory`, and nothing else) ends the step. The frames of its traceback are dropped,
for they hold every tensor of the pass; the cache gets back what it held; garbage is collected, which frees what
reference cycles hold; torch's allocator returns its unused blocks to the device. Then the step runs once more, and
gives the same bits as one that never failed. A second failure is `OutOfMemory`, with a table of what holds the memory;
the cache is again as before, so that its owner can go on from it or drop it, and other requests never notice.

What the package keeps by itself (`inverse_frequencies` of the model, `constant` of the norms) is not let go: at most 40
tensors of some hundred bytes, whose addresses captured graphs may have. A workspace is declared memory and stays too.

Cost of a step that does not fail. Convolution windows and recurrent states are replaced layer by layer and never
written to, so that references to the old ones are enough; but these live until the step ends: the peak grows by one
set of windows and states (of S sequences S x linear layers x (V K W x 4 bytes + a window)). Only where a backend that
may be chosen declares in `mutates` that it writes to them are they copied. Key stores are written behind the valid
rows, or replaced by longer ones with the same rows: nothing is kept of them, and rolling back fills the rows behind
`lengths` with zeros, as they were. So a store that had grown keeps its capacity.

An observer (`model.tap`) sees the part of the pass that failed and then the whole pass, and attested calls count both.

Several processes. Under tensor parallelism every rank takes part in each collective of a step. A rank that retries
alone waits for the others for ever. So all ranks have to agree before the retry: after every step, failed or not, an
all-reduce (max) of "out of memory here" in memory that was allocated beforehand; where it is 1, all roll back and all
retry; a second 1 fails the request on all. That is not done here: `Recovery` is for a model in a single process.

CUDA graphs. A captured graph replays in its private pool, allocates nothing, and cannot run out of memory. While a
graph is captured nothing is recovered: the error is passed on as it is, since the capture is lost. Whoever captures
frees memory and captures anew. `torch.cuda.empty_cache` leaves the pools of live graphs alone.
"""

from __future__ import annotations

import gc
import inspect
import itertools
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from workbench.cache import Cache, DeltaCache
from workbench.errors import InputError, WorkbenchError, one_line
from workbench.generation import check_settings, sample
from workbench.kernels.dispatch import STATE_INPUTS, Site
from workbench.kernels.out_of_memory import chain_of, is_out_of_memory
from workbench.kernels.registry import Backend, Call, operation_named
from workbench.memory_table import HeldTensor, MemoryTable, cache_tensors, in_use_on, memory_table, storage_of
from workbench.model import CausalLM, DecoderLayer, ModelOutput
from workbench.taps import full_name

#: A step is run this often at most.
ATTEMPTS = 2


class RecoveryWarning(UserWarning):
    """A step ran out of memory and was run again, and nobody asked to be told in another way."""


class OutOfMemory(WorkbenchError):
    """A step ran out of memory twice: `incident` says where, `table` what held the memory."""

    def __init__(self, incident: Incident, table: MemoryTable):
        super().__init__(
            f"out of memory in {incident.place}: expected {incident.sequences} x {incident.tokens} tokens to fit once "
            f"memory was freed and the step run again, found: {incident.error}; shorten the prompt, serve fewer "
            "requests at once, or take a narrower dtype or a larger device"
        )
        self.incident, self.table = incident, table


@dataclass(frozen=True, slots=True)
class Incident:
    """One step that ran out of memory: where (the last place, if twice), for what, and whether the retry saved it.

    layer     number of the decoder layer; None outside of the layers
    op        op of the kernels, with its `backend`; None between them
    function  the innermost function of the package and its line
    tokens    new tokens of each of `sequences` sequences
    error     the first line of what the allocator said
    """

    layer: int | None
    op: str | None
    backend: str | None
    function: str
    tokens: int
    sequences: int
    error: str
    is_recovered: bool

    @property
    def place(self) -> str:
        """``layers.03, op experts, backend torch_sorted (workbench.kernels.linear.torch_matmul.run:31)``."""
        layer = "no layer" if self.layer is None else full_name(self.layer, "").rstrip(".")
        op = "" if self.op is None else f", op {self.op}, backend {self.backend}"
        return f"{layer}{op} ({self.function})"

    def __str__(self) -> str:
        end = "rolled back and run again, with success" if self.is_recovered else "failed again when it was run again"
        return one_line(f"out of memory in {self.place}, {self.sequences} x {self.tokens} tokens: {end}: {self.error}")

    def to_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class RecoveryCount:
    """How many steps ran out of memory at one place, and how many of these the retry saved."""

    layer: int | None
    op: str | None
    recovered: int
    failed: int


def drop_frames(error: BaseException) -> None:
    """Let go of the tensors that the frames of an error hold; type, text and causes stay."""
    for link in chain_of(error, with_context=True):
        traceback.clear_frames(link.__traceback__)  # somebody else may hold a frame
        link.__traceback__ = None


# ---- what the cache was


@dataclass(slots=True)
class _Kept:
    """What a cache held before a step. `copies` are of tensors that a backend may write to, (tensor, copy)."""

    cache: Cache
    lengths: list[int]
    memory: list[tuple[Tensor, Tensor] | None]
    copies: list[tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, cache: Cache, written: Collection[str]) -> _Kept:
        """`written`: names of the state inputs of the ops (`STATE_INPUTS`) that a backend may write to."""
        memory = [(x.window, x.state) if isinstance(x, DeltaCache) else None for x in cache.layers]
        copied = ("window" in written, "initial_state" in written)
        copies = [
            (tensor, tensor.clone())
            for pair in memory if pair is not None
            for tensor, is_copied in zip(pair, copied, strict=True) if is_copied
        ]  # fmt: skip
        return cls(cache, list(cache.lengths), memory, copies)

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back, without allocating."""
        self.cache.lengths = list(self.lengths)
        for layer, pair in zip(self.cache.layers, self.memory, strict=True):
            if isinstance(layer, DeltaCache):
                layer.window, layer.state = pair
                continue
            # Masked out but read: a NaN left there by the failed step would pass through a weight of 0.
            for store in (layer.keys, layer.values):
                for s, length in enumerate(self.lengths):
                    store[s, length:].zero_()
        for tensor, copy in self.copies:
            tensor.copy_(copy)


# ---- where it happened, and what was held


def _frames(error: BaseException) -> list[tuple[FrameType, int]]:
    """(frame, line) of the functions below the step, outermost first, through the chain of causes."""
    found = []
    for depth, link in enumerate(chain_of(error, with_context=False)):
        frames = list(traceback.walk_tb(link.__traceback__))
        found += frames[1:] if depth == 0 else frames  # the first is our own and still runs
    # Of a module's body `f_locals` are its globals.
    return [(frame, line) for frame, line in found if frame.f_code.co_flags & inspect.CO_OPTIMIZED]


def _function(frame: FrameType, line: int) -> str:
    return f"{frame.f_globals.get('__name__', '?')}.{frame.f_code.co_name}:{line}"


@dataclass(slots=True)
class _Seen:
    """What is to be known of a failed attempt, without a reference to it."""

    layer: int | None = None
    op: str | None = None
    backend: str | None = None
    function: str = "?"
    error: str = ""
    in_use: int | None = None
    activations: list[HeldTensor] = field(default_factory=list)

    @classmethod
    def of(cls, error: BaseException, model: CausalLM, caches: Iterable[Cache]) -> _Seen:
        """Read the frames of `error`; tensors of the weights and of `caches` are no activations."""
        causes = [link for link in chain_of(error, with_context=False) if is_out_of_memory(link)]
        seen = cls(error=_first_line(causes[-1]), in_use=in_use_on(model.device))
        known = itertools.chain(model.parameters(), model.buffers(), *map(cache_tensors, caches))
        storages = {storage_of(tensor) for tensor in known}
        held: list[HeldTensor] = []
        for frame, line in _frames(error):
            variables, function = frame.f_locals, _function(frame, line)
            owner = variables.get("self")
            if isinstance(owner, DecoderLayer):
                seen.layer = next((i for i, layer in enumerate(model.layers) if layer is owner), None)
            elif isinstance(owner, Site):
                seen.op, seen.backend = owner.call.op, owner.resolution.backend.name
            if function.startswith("workbench."):
                seen.function = function
            for name, value in variables.items():
                parts = value if isinstance(value, tuple | list) else (value,)
                for tensor in parts:
                    has_storage = isinstance(tensor, Tensor) and tensor.layout == torch.strided
                    if has_storage and storage_of(tensor) not in storages:
                        storages.add(storage_of(tensor))
                        dtype = str(tensor.dtype).removeprefix("torch.")
                        size = tensor.untyped_storage().nbytes()
                        held.append(HeldTensor(name, function, tuple(tensor.shape), dtype, size))
            if isinstance(variables, dict):
                variables.clear()  # up to Python 3.12 a copy that the frame keeps
        seen.activations = sorted(held, key=lambda tensor: -tensor.n_bytes)
        return seen

    def incident(self, tokens: int, sequences: int, *, is_recovered: bool) -> Incident:
        return Incident(
            self.layer, self.op, self.backend, self.function, tokens, sequences, self.error, is_recovered
        )  # fmt: skip


def _first_line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return one_line(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def free_memory(device: torch.device) -> None:
    """Collect garbage, then return the unused blocks of torch's allocator to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# ---- the wrapper


class Recovery:
    """Runs steps of a model so that one that is out of memory is rolled back and run once more.

    `tell` is called with the `Incident` of each step that ran out of memory, once it is known how that ended; without
    it a `RecoveryWarning` says so. `incidents` are all of them.
    """

    def __init__(self, model: CausalLM, tell: Callable[[Incident], None] | None = None):
        self.model = model
        self.tell = tell if tell is not None else _warn
        self.incidents: list[Incident] = []
        self._written: dict[tuple, frozenset[str]] = {}

    def step(
        self, input_ids: Tensor, *, cache: Cache | None = None, held: Sequence[Cache] = (), **options: Any
    ) -> ModelOutput:
        """``model(input_ids, cache=cache, **options)`` with one retry.

        `held` are caches of other requests, for the table. Raises OutOfMemory when the retry is out of memory too,
        with `cache` as it was before the step; whatever else the model raises is passed on at once.
        """
        kept: list[_Kept] = []

        def run() -> ModelOutput:
            if cache is not None and not kept:  # copies may be what does not fit
                kept.append(_Kept.of(cache, self._written_by_backends(input_ids)))
            return self.model(input_ids, cache=cache, **options)

        def undo() -> None:
            for before in kept:
                before.restore()

        return self._attempt(run, undo, tuple(input_ids.shape), cache, held)

    def sample(
        self, logits: Tensor, *, temperature: float, top_p: float, generator: torch.Generator | None,
        cache: Cache | None = None, held: Sequence[Cache] = (),
    ) -> Tensor:  # fmt: skip
        """`generation.sample` with one retry, which draws the number that the first attempt would have drawn."""
        is_drawn = generator is not None and temperature != 0.0
        before = generator.get_state() if is_drawn else None

        def run() -> Tensor:
            return sample(logits, temperature=temperature, top_p=top_p, generator=generator)

        def undo() -> None:
            if is_drawn:
                generator.set_state(before)

        return self._attempt(run, undo, (logits.shape[0], 1), cache, held)

    def attestation(self) -> list[RecoveryCount]:
        """Steps that ran out of memory so far, by layer and op; layers first, in their order."""
        places = Counter((x.layer, x.op, x.is_recovered) for x in self.incidents)
        keys = sorted({key[:2] for key in places}, key=lambda k: (k[0] is None, k[0] or 0, k[1] or ""))
        return [RecoveryCount(*key, places[(*key, True)], places[(*key, False)]) for key in keys]

    def _attempt(
        self, run: Callable[[], Any], undo: Callable[[], None], shape: tuple[int, ...], cache: Cache | None,
        held: Sequence[Cache],
    ) -> Any:  # fmt: skip
        device, seen = self.model.device, None
        for _ in range(ATTEMPTS):
            try:
                output = run()
            except Exception as error:
                is_captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
                if is_captured or not is_out_of_memory(error):
                    raise
                seen = _Seen.of(error, self.model, [*([] if cache is None else [cache]), *held])
                drop_frames(error)
                cause = error
            else:
                if seen is not None:
                    self._record(seen.incident(shape[-1], shape[0], is_recovered=True))
                return output
            # Out of the handler, for in it the interpreter holds the attempt; nor may a variable here hold its tensors.
            undo()
            free_memory(device)
        incident = seen.incident(shape[-1], shape[0], is_recovered=False)
        table = memory_table(self.model, cache, held, in_use=seen.in_use, activations=seen.activations)
        self._record(incident)
        raise OutOfMemory(incident, table) from cause

    def _record(self, incident: Incident) -> None:
        self.incidents.append(incident)
        self.tell(incident)

    def _written_by_backends(self, input_ids: Tensor) -> frozenset[str]:
        """Names of the state inputs that a backend writes to which may serve a step of these ids."""
        # Of a padded batch the tokens are packed: more than one row has, at most all.
        key = (input_ids.shape[-1] if input_ids.dim() else 1, input_ids.numel(), torch.is_grad_enabled())
        if key not in self._written:
            self._written[key] = frozenset(
                name
                for op, inputs in STATE_INPUTS.items()
                for backend in self._candidates(op, {*key[:2]}, key[2])
                for name in backend.mutates if name in inputs
            )  # fmt: skip
        return self._written[key]

    def _candidates(self, op: str, token_counts: Collection[int], needs_grad: bool) -> list[Backend]:
        """Backends of an op that may serve such a step: the one named, or those of the order that do not refuse."""
        kernels, operation = self.model.kernels, operation_named(op)
        if kernels.card is not None:  # its rules may send a call anywhere
            return list(operation.backends.values())
        if op in kernels.requested:
            return [operation.backends[kernels.requested[op]]]
        wide = torch.promote_types(self.model.dtype, torch.float32)
        dtype = wide if op == "gated_delta_rule" else self.model.dtype
        found = []
        for tokens, is_packed in itertools.product(token_counts, (False, True)):
            call = Call(op, self.model.device.type, dtype, tokens, is_packed, needs_grad, kernels.policy)
            backends = [operation.backends[name] for name in operation.automatic_order(call)]
            found += [backend for backend in backends if backend.refusal(call) is None]
        return found


def _warn(incident: Incident) -> None:
    warnings.warn(str(incident), RecoveryWarning, stacklevel=5)


# ---- several requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt [1, T] on the model's device, and how to continue it: see `generation.generate`."""

    input_ids: Tensor
    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    stop_ids: Collection[int] = ()
    seed: int | None = None


@dataclass(slots=True)
class Outcome:
    """What became of a request: its new `tokens`, the `reason` for the end, `failure` where that is out_of_memory.

    `reason` is stop, length or out_of_memory; a request that failed keeps the tokens that it had.
    """

    tokens: list[int] = field(default_factory=list)
    reason: str = ""
    failure: OutOfMemory | None = None


@dataclass(slots=True)
class _Running:
    request: Request
    outcome: Outcome
    generator: torch.Generator | None
    next_ids: Tensor | None
    cache: Cache | None = None

    @classmethod
    def start(cls, request: Request, device: torch.device) -> _Running:
        generator = None if request.seed is None else torch.Generator(device).manual_seed(request.seed)
        return cls(request, Outcome(), generator, request.input_ids)


@torch.no_grad()
def serve_requests(
    model: CausalLM, requests: Sequence[Request], *, recovery: Recovery | None = None,
    stream: Callable[[int, int], None] | None = None,
) -> list[Outcome]:  # fmt: skip
    """Continue several prompts side by side, a token of each in turn; each has a cache of its own.

    A request that is out of memory twice in one step fails alone: its cache is dropped at once, and the others go on
    with the room that this makes. Tokens are those of `generation.generate` of each request by itself. `stream` is
    called with the number of the request and each token. Raises InputError for settings that cannot be used, before
    anything runs; every error but OutOfMemory ends all requests.
    """
    for request in requests:
        if not isinstance(request.stop_ids, Collection):
            raise InputError(f"stop_ids: expected a collection of token ids, found {request.stop_ids!r}")
        check_settings(
            model, request.input_ids, request.max_new_tokens, request.temperature, request.top_p, request.seed
        )
        if request.input_ids.dim() != 2 or request.input_ids.shape[0] != 1:
            raise InputError(f"input_ids: expected one prompt, [1, T], found {tuple(request.input_ids.shape)}")
    recovery = Recovery(model) if recovery is None else recovery
    all_running = [_Running.start(request, model.device) for request in requests]
    while any(not running.outcome.reason for running in all_running):
        for number, running in enumerate(all_running):
            if running.outcome.reason:
                continue
            held = [other.cache for other in all_running if other.cache is not None and other is not running]
            try:
                token = _advance(recovery, running, held)
            except OutOfMemory as failure:
                running.outcome.reason, running.outcome.failure = "out_of_memory", failure
                drop_frames(failure)
            else:
                if stream is not None:
                    stream(number, token)
            if running.outcome.reason:
                running.cache = running.next_ids = None
                if running.outcome.failure is not None:
                    free_memory(model.device)
    return [running.outcome for running in all_running]


def _advance(recovery: Recovery, running: _Running, held: Sequence[Cache]) -> int:
    """One token more; sets the outcome's reason when it is the last."""
    request, outcome = running.request, running.outcome
    output = recovery.step(running.next_ids, cache=running.cache, held=held, last_only=True)
    running.cache = output.cache
    chosen = recovery.sample(
        output.logits[:, -1], temperature=request.temperature, top_p=request.top_p, generator=running.generator,
        cache=running.cache, held=held,
    )  # fmt: skip
    token = int(chosen)
    outcome.tokens.append(token)
    running.next_ids = chosen[:, None]
    if token in request.stop_ids:
        outcome.reason = "stop"
    elif len(outcome.tokens) == request.max_new_tokens:
        outcome.reason = "length"
    return token
