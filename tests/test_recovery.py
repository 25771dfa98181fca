"""Out of memory at any operator of any layer: one failure leaves no trace, two fail one request and no other."""

import gc
import json
import subprocess
import sys
import weakref
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import mini, mini_dense, mini_next
from small_checkpoint import write_small_checkpoint
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from workbench import cli
from workbench import recovery as module
from workbench.analysis.memory import _Watching
from workbench.cache import Cache, DeltaCache, KeyValueCache
from workbench.config import ModelConfig
from workbench.errors import InputError, NonFiniteError, WorkbenchError
from workbench.kernels import Kernels
from workbench.kernels.dispatch import STATE_INPUTS
from workbench.kernels.registry import OPERATIONS, register_backend
from workbench.memory_table import memory_table
from workbench.model import CausalLM, DecoderLayer
from workbench.recovery import (
    OutOfMemory,
    Recovery,
    RecoveryWarning,
    Request,
    drop_frames,
    is_out_of_memory,
    serve_requests,
)
from workbench.tracing.dump import tapping

ROOT = Path(__file__).resolve().parent.parent
BUILDERS = {"mini": mini, "dense": mini_dense, "next": mini_next}
#: A prompt of 70 tokens has a store of 70 rows: the first token after it makes the store grow, the second does not.
PROMPT, STEPS = 70, 4


def build(name: str = "mini", kernels: Kernels | None = None) -> CausalLM:
    """Wide weights, for text that does not repeat one token."""
    config = ModelConfig.from_hf(BUILDERS[name](initializer_range=0.1))
    return CausalLM(config, kernels).init_weights(0).eval()


MODELS = {name: build(name) for name in BUILDERS}


def random_ids(rows: int, tokens: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 97, (rows, tokens), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True, scope="module")
def _collect_what_is_new():
    """A collection visits all that was ever imported; it takes a tenth of the time without."""
    undisturbed("mini")  # the first operator that is intercepted imports much
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Failing(TorchDispatchMode):
    """Out of memory at one operator of one layer, in the passes whose numbers are `attempts`; a retry is a pass.

    `layer` None is what lies before, between and after the layers. `place` picks the operator, from 0 for the first to
    just below 1 for the last, of those that the same pass had in a run that did not fail (`counts`).
    """

    def __init__(self, model: CausalLM, layer=None, place=0.0, attempts=(), counts=None, error=None):
        super().__init__()
        self.layer, self.place, self.attempts, self.expected = layer, place, attempts, counts
        self.error = error or (lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore"))
        self.counts: dict[tuple[int, int | None], int] = {}
        self.attempt, self.inside, self.now = -1, False, None
        self.raised: list[BaseException] = []
        self.keeps_frames, self.frames = False, []  # of the functions that met the failure, as a debugger keeps them
        self.hooks = [
            model.register_forward_pre_hook(self._begin), model.register_forward_hook(self._end),
            *(layer.register_forward_pre_hook(lambda *_, i=i: self._enter(i)) for i, layer in enumerate(model.layers)),
            *(layer.register_forward_hook(lambda *_: self._enter(None)) for layer in model.layers),
        ]  # fmt: skip

    def _begin(self, *_) -> None:
        self.attempt, self.inside, self.now = self.attempt + 1, True, None

    def _end(self, *_) -> None:
        self.inside = False

    def _enter(self, layer: int | None) -> None:
        self.now = layer

    def __exit__(self, *exc) -> None:
        super().__exit__(*exc)
        for hook in self.hooks:
            hook.remove()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.inside:
            number = self.counts.get((self.attempt, self.now), 0)
            self.counts[self.attempt, self.now] = number + 1
            if self.attempt in self.attempts and self.now == self.layer and number == self._wanted():
                self.inside = False
                if self.keeps_frames:
                    self.frames.append(sys._getframe(1))
                self.raised.append(self.error())
                raise self.raised[-1]
        return func(*args, **(kwargs or {}))

    def _wanted(self) -> int:
        """The retry may have fewer operators, where the store has grown already: it fails at half the way."""
        first = min(self.attempts)
        return int(self.place * self.expected[first, self.layer] * (1.0 if self.attempt == first else 0.5))


def bits(cache: Cache) -> list[Tensor]:
    """Everything that a cache holds, spare rows too."""
    return [
        getattr(layer, name)
        for layer in cache.layers
        for name in (("keys", "values") if isinstance(layer, KeyValueCache) else ("window", "state"))
    ]


def same(left: Cache, right: Cache) -> bool:
    pairs = zip(bits(left), bits(right), strict=True)
    return left.lengths == right.lengths and all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs)


@torch.inference_mode()
def passes(model: CausalLM, prompt: Tensor, failing: Failing, recovery: Recovery | None = None, **first):
    """A prefill and greedy tokens after it: logits of every pass, and the cache."""
    step, logits, ids, cache = model if recovery is None else recovery.step, [], prompt, None
    with failing:
        for number in range(STEPS):
            output = step(ids, cache=cache, **(first if number == 0 else {}))
            cache = output.cache
            logits.append(output.logits)
            ids = output.logits[:, -1].argmax(-1)[:, None]
    return logits, cache


@cache
def undisturbed(name: str, rows: int = 1):
    """Logits, cache and operators of a run that does not fail."""
    passes(MODELS[name], random_ids(rows, PROMPT), Failing(MODELS[name]), **ragged(rows))  # what is done once
    counting = Failing(MODELS[name])
    return *passes(MODELS[name], random_ids(rows, PROMPT), counting, **ragged(rows)), counting


def ragged(rows: int) -> dict:
    """Prompts of a batch end at different tokens; they are packed, in a pass within the pass."""
    if rows == 1:
        return {}
    mask = torch.ones(rows, PROMPT, dtype=torch.int64)
    for row in range(1, rows):
        mask[row, : 20 * row] = 0
    return {"attention_mask": mask}


def check_one_failure(name: str, layer: int | None, place: float, step: int, rows: int = 1) -> Recovery:
    expected, cache, counting = undisturbed(name, rows)
    model, told = MODELS[name], []
    # With a mask the prefill is two passes, of which the inner one has the layers.
    attempt = step if rows == 1 else step + 1
    recovery = Recovery(model, told.append)
    failing = Failing(model, layer, place, {attempt}, counting.counts)
    found, after = passes(model, random_ids(rows, PROMPT), failing, recovery, **ragged(rows))
    assert len(failing.raised) == 1, "the failure was never reached"
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert same(after, cache)
    (incident,) = recovery.incidents
    assert told == [incident] and incident.is_recovered and incident.layer == layer
    assert (incident.tokens, incident.sequences) == (PROMPT if step == 0 else 1, rows)
    return recovery


# ---- one failure


@pytest.mark.parametrize("step", range(3))
@pytest.mark.parametrize("layer", [0, 1, 2, 3, None])
def test_a_failure_anywhere_in_a_layer_leaves_no_trace(layer, step):
    """At its first and last operator and at five between, in the prefill, where the store grows, and where not."""
    places = [*(i / 6 for i in range(6)), 0.9999]
    ops = set()
    for place in places:
        recovery = check_one_failure("mini", layer, place, step)
        ops.update(row.op for row in recovery.attestation())
    if layer is not None:
        assert len(ops - {None}) >= 3, ops


@settings(max_examples=50)
@given(
    name=st.sampled_from(list(BUILDERS)), layer=st.sampled_from([0, 1, 2, 3, None]),
    place=st.floats(0.0, 1.0, exclude_max=True), step=st.integers(0, STEPS - 1), rows=st.sampled_from([1, 3]),
)  # fmt: skip
def test_a_failure_at_any_operator_leaves_no_trace(name, layer, place, step, rows):
    if rows > 1 and step == 0 and layer is None:
        step = 1  # the outer pass of a masked prefill has operators of its own
    check_one_failure(name, layer, place, step, rows)


def test_packed_sequences_are_rolled_back_one_by_one():
    model, bounds = MODELS["mini"], torch.tensor([0, 30, 31, 70])
    packed, more = random_ids(1, PROMPT), random_ids(1, 8, seed=5)
    with torch.inference_mode():
        first = model(packed, cu_seqlens=bounds)
        kept = first.cache.clone()
        with Failing(model) as counting:
            expected = model(more, cache=first.cache, cu_seqlens=torch.tensor([0, 5, 7, 8]))
        for layer in range(4):
            cache, recovery = kept.clone(), Recovery(model, print)
            with Failing(model, layer, 0.95, {0}, counting.counts) as failing:
                found = recovery.step(more, cache=cache, cu_seqlens=torch.tensor([0, 5, 7, 8]))
            assert failing.raised and torch.equal(found.logits, expected.logits)
            assert same(found.cache, expected.cache)


def test_states_are_kept_by_reference():
    """They are replaced and never written to, so that a step that does not fail copies nothing."""
    model = MODELS["mini"]
    with torch.inference_mode():
        cache = model(random_ids(1, PROMPT)).cache
        before = bits(cache)
        _, _, counting = undisturbed("mini")
        with Failing(model, None, 0.9999, {0, 1}, {(0, None): counting.counts[1, None]}), pytest.raises(OutOfMemory):
            Recovery(model, print).step(random_ids(1, 1), cache=cache)
    for layer, pair in zip(cache.layers, zip(before[::2], before[1::2], strict=True), strict=True):
        if isinstance(layer, DeltaCache):
            assert layer.window is pair[0] and layer.state is pair[1]


@pytest.mark.parametrize("op", sorted(STATE_INPUTS))
def test_backends_write_to_no_state_that_they_do_not_declare(op):
    """What rolling back by reference rests on, for every backend that can run here."""
    tried = []
    for name, backend in OPERATIONS[op].backends.items():
        model = build("mini", Kernels({op: name}))
        with torch.inference_mode():
            try:
                cache = model(random_ids(1, PROMPT)).cache
                for tokens in (1, 5, PROMPT):
                    before = [(layer.window, layer.state) for layer in cache.layers if isinstance(layer, DeltaCache)]
                    copies = [(window.clone(), state.clone()) for window, state in before]
                    model(random_ids(1, tokens), cache=cache)
                    for pair, copy in zip(before, copies, strict=True):
                        for tensor, was, given_as in zip(pair, copy, ("window", "initial_state"), strict=True):
                            assert torch.equal(tensor, was) or given_as in backend.mutates, name
            except WorkbenchError as refused:
                assert "cannot serve" in str(refused), name
                continue
        tried.append(name)
    assert len(tried) >= 2


@pytest.mark.parametrize("failures", [1, 2])
def test_inputs_that_a_backend_writes_to_are_copied(monkeypatch, failures):
    def writing(op: str, given_as: str):
        inner = OPERATIONS[op].backends["reference"]

        def run(*args, **named):
            result, state = inner.run(*args, **named)
            given_state = named[given_as]
            if given_state is None:
                return result, state
            given_state.copy_(state)
            return result, given_state

        monkeypatch.setitem(OPERATIONS, op, OPERATIONS[op])
        register_backend(op, "in_place", run, inner.supports, mutates=(given_as,))

    writing("causal_conv", "window")
    writing("gated_delta_rule", "initial_state")
    model = build("mini", Kernels({"causal_conv": "in_place", "gated_delta_rule": "in_place"}))
    with torch.inference_mode():
        start = model(random_ids(1, PROMPT)).cache
        token = random_ids(1, 1)
        with Failing(model) as counting:
            expected = model(token, cache=start.clone())
        for layer in range(4):
            cache, recovery = start.clone(), Recovery(model, print)
            with Failing(model, layer, 0.9999, set(range(failures)), counting.counts) as failing:
                if failures == 2:
                    with pytest.raises(OutOfMemory):
                        recovery.step(token, cache=cache)
                else:
                    recovery.step(token, cache=cache)
            assert len(failing.raised) == failures
            if failures == 2:
                valid = PROMPT * start.layers[3].keys[:, 0].numel()
                assert torch.equal(cache.layers[3].keys.flatten()[:valid], start.layers[3].keys.flatten())
                assert all(torch.equal(a, b) for a, b in zip(bits(cache)[:6], bits(start)[:6], strict=True))
                recovery.step(token, cache=cache)
            assert same(cache, expected.cache)


@pytest.mark.parametrize("keeps_frames", [False, True])
def test_nothing_of_the_failed_attempt_is_alive_at_the_retry(keeps_frames):
    """Also where somebody keeps the error, and where a cycle holds a tensor that only a collection frees.

    Of frames that somebody keeps, torch's own hold the arguments of the layer in a cell, which nobody can clear.
    """
    arguments = 4 * (64 + 2 * 4) if keeps_frames else 0  # a row of the residual stream, cosines and sines
    model, alive, cycle = MODELS["mini"], [], []

    class Ballast:
        def __init__(self) -> None:
            self.itself, self.memory = self, torch.zeros(1000)

    def before(*_) -> None:
        alive.append(watching.bytes)
        if len(alive) == 1:
            cycle.append(weakref.ref(Ballast()))

    _, _, counting = undisturbed("mini")
    with torch.inference_mode():
        cache = model(random_ids(1, PROMPT)).cache
        model(random_ids(1, 1), cache=cache)  # so that the store does not grow
        for layer in range(4):
            alive.clear()
            hook = None
            failing = Failing(model, layer, 0.8, {0}, {(0, layer): counting.counts[1, layer]})
            failing.keeps_frames = keeps_frames
            gc.disable()
            try:
                with _Watching() as watching, failing:
                    hook = model.register_forward_pre_hook(before)
                    copy = cache.clone()
                    Recovery(model, print).step(random_ids(1, 1), cache=copy)
            finally:
                gc.enable()
                hook.remove()
            assert len(failing.raised) == 1 and failing.raised[0].__traceback__ is None
            assert len(alive) == 2 and alive[0] > 0 and alive[1] - alive[0] <= arguments
            assert cycle.pop()() is None


class Spoiler:
    """A tap that makes NaN of everything in the first pass that it sees."""

    def __init__(self) -> None:
        self.passes = 0

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        self.passes += name == "embed"
        return tensor * torch.nan if self.passes == 1 and tensor.is_floating_point() else tensor

    def scope(self, prefix: str) -> None:
        return None


@pytest.mark.parametrize("failures", [1, 2])
def test_no_value_of_a_failed_attempt_is_read_later(failures):
    """NaN in the rows of an aborted step would pass through the mask of sequences of other lengths."""
    model = build()
    with torch.inference_mode():
        start = model(random_ids(3, PROMPT), **ragged(3)).cache
        model(random_ids(3, 1), cache=start)  # grows the store: there are spare rows
        tokens, token = random_ids(3, 5), random_ids(3, 1)
        with Failing(model) as counting:
            expected = model(tokens, cache=start.clone())
        if failures == 2:
            expected = model(token, cache=start.clone())
        cache, recovery = start.clone(), Recovery(model, print)
        model.tap = Spoiler()
        with Failing(model, 3, 0.9999, set(range(failures)), counting.counts) as failing:
            if failures == 1:
                found = recovery.step(tokens, cache=cache)
            else:
                with pytest.raises(OutOfMemory):
                    recovery.step(tokens, cache=cache)
                assert same(cache, start)
                found = recovery.step(token, cache=cache)
        assert len(failing.raised) == failures
    assert found.logits.isfinite().all() and torch.equal(found.logits, expected.logits)
    assert same(found.cache, expected.cache)


# ---- two failures


@pytest.mark.parametrize("step", [0, 1, 2])
@pytest.mark.parametrize("layer", [0, 2, 3, None])
def test_two_failures_leave_the_cache_as_it_was(layer, step):
    model = MODELS["mini"]
    expected, _, counting = undisturbed("mini")
    recovery = Recovery(model, print)
    ids, cache = random_ids(1, PROMPT), None
    with torch.inference_mode():
        for _ in range(step):
            output = model(ids, cache=cache)
            cache, ids = output.cache, output.logits[:, -1:].argmax(-1)
        before = cache
        for place in (0.0, 0.4, 0.9999):
            cache = None if before is None else before.clone()
            with (
                Failing(model, layer, place, {0, 1}, {(0, layer): counting.counts[step, layer]}) as failing,
                pytest.raises(OutOfMemory) as caught,
            ):
                recovery.step(ids, cache=cache)
            assert len(failing.raised) == 2 and caught.value.__cause__ is not None
            assert is_out_of_memory(caught.value)  # by its cause, for whoever wraps this
            if cache is not None:
                rows = before.lengths[0]
                for layer_now, layer_then in zip(cache.layers, before.layers, strict=True):
                    if isinstance(layer_now, DeltaCache):
                        assert torch.equal(layer_now.state, layer_then.state)
                        assert torch.equal(layer_now.window, layer_then.window)
                        continue
                    for now, then in ((layer_now.keys, layer_then.keys), (layer_now.values, layer_then.values)):
                        assert torch.equal(now[:, :rows], then[:, :rows]) and not now[:, rows:].any()
        found = recovery.step(ids, cache=cache)
    assert torch.equal(found.logits, expected[step])
    (count,) = {(row.layer, row.recovered) for row in recovery.attestation()}
    assert count == (layer, 0) and sum(row.failed for row in recovery.attestation()) == 3


def requests(**changes) -> list[Request]:
    return [
        Request(input_ids=random_ids(1, tokens, seed=tokens), max_new_tokens=count, **changes)
        for tokens, count in ((70, 6), (33, 8), (5, 7))
    ]


@cache
def undisturbed_requests():
    """Outcomes and operators of the requests when nothing fails."""
    serve_requests(MODELS["mini"], requests())  # what is done once
    with Failing(MODELS["mini"]) as counting:
        return serve_requests(MODELS["mini"], requests()), counting


@pytest.mark.parametrize("changes", [{}, {"temperature": 1.3, "top_p": 0.9, "seed": 4}, {"stop_ids": (11, 3, 50, 8)}])
def test_requests_get_what_each_gets_alone(changes):
    model = MODELS["mini"]
    seen = [[], [], []]
    outcomes = serve_requests(model, requests(**changes), stream=lambda number, token: seen[number].append(token))
    for request, outcome, streamed in zip(requests(**changes), outcomes, seen, strict=True):
        alone = model.generate(request.input_ids, max_new_tokens=request.max_new_tokens, **changes)
        assert outcome.tokens == streamed == alone.sequences[0]
        assert outcome.reason == alone.reasons[0] and outcome.failure is None


@pytest.mark.parametrize("failures", [1, 2])
@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize(("layer", "step"), [(0, 0), (3, 0), (1, 2), (3, 3), (None, 1)])
def test_one_request_fails_alone(number, layer, step, failures):
    model = MODELS["mini"]
    expected, counting = undisturbed_requests()
    attempt = 3 * step + number  # they take turns
    recovery, streamed = Recovery(model, print), []
    with Failing(model, layer, 0.7, set(range(attempt, attempt + failures)), counting.counts) as failing:
        found = serve_requests(model, requests(), recovery=recovery, stream=lambda n, token: streamed.append(n))
    assert len(failing.raised) == failures
    for i, (outcome, alone) in enumerate(zip(found, expected, strict=True)):
        if i != number or failures == 1:
            assert outcome == alone
    if failures == 2:
        outcome = found[number]
        assert outcome.reason == "out_of_memory" and outcome.tokens == expected[number].tokens[:step]
        assert streamed.count(number) == step
        check_table(outcome.failure, n_others=number if step == 0 else 2)
    (row,) = recovery.attestation()
    assert row.layer == layer and (row.recovered, row.failed) == (failures == 1, failures == 2)


def check_table(failure: OutOfMemory, n_others: int) -> None:
    """The figures are those of the model, and the message is one line that says what to do."""
    message, table = str(failure), failure.table
    assert "\n" not in message and "out of memory in" in message and "shorten the prompt" in message
    assert "Tried to allocate 2.00 GiB." in message
    rows = {row.what: row for row in table.rows}
    weights = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in MODELS["mini"].parameters()}
    assert rows["weights"].n_bytes == sum(weights.values())
    assert f"caches of {n_others} other requests" in rows
    assert rows["resident when the step failed"].n_bytes > 2**20
    assert rows["free on the machine"].n_bytes < rows["total of the machine"].n_bytes
    assert rows["limit of the address space"].note == "none" or rows["limit of the address space"].n_bytes
    assert table.largest and table.largest[0].n_bytes >= table.largest[-1].n_bytes > 0
    text = str(table)
    assert all(row.what in text for row in table.rows) and all(held.name in text for held in table.largest)
    assert json.loads(json.dumps(table.to_json()))["rows"][0] == {
        "what": "weights", "n_bytes": rows["weights"].n_bytes, "note": "",
    }  # fmt: skip


def test_the_table_names_the_cache_by_kind_and_the_largest_tensors():
    model = MODELS["mini"]
    with torch.inference_mode():
        cache, other = (model(random_ids(1, PROMPT)).cache for _ in range(2))
        _, _, counting = undisturbed("mini")
        with Failing(model, 3, 0.9999, {0, 1}, {(0, 3): counting.counts[0, 3]}), pytest.raises(OutOfMemory) as caught:
            Recovery(model, print).step(random_ids(1, PROMPT), cache=cache, held=[other])
    rows = {row.what: row.n_bytes for row in caught.value.table.rows}
    assert rows["recurrent states of this request"] == sum(x.state.nbytes for x in cache.layers[:3])
    windows = [x.window.untyped_storage().nbytes() for x in cache.layers[:3]]
    assert rows["convolution windows of this request"] == sum(windows)
    store = cache.layers[3].keys.nbytes + cache.layers[3].values.nbytes
    assert rows["keys and values of this request"] == store
    assert rows["caches of 1 other requests"] == sum(
        {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in bits(other)}.values()
    )
    assert rows["activations that variables named, when it failed"] >= 4 * PROMPT * 64  # the residual stream at least
    assert any(held.function.startswith("workbench.") for held in caught.value.table.largest)
    now = memory_table(model, cache)  # also without a failure
    assert now.rows[0].n_bytes == rows["weights"] and not any("failed" in row.what for row in now.rows)


def test_tensors_without_storage_do_not_hide_the_failure():
    model = MODELS["mini"]

    class Sparse:
        sees_inside, left = False, 1

        def __call__(self, name, tensor):
            sparse, opaque = tensor.to_sparse(), tensor.to_mkldnn()
            if self.left:
                self.left -= 1
                raise torch.OutOfMemoryError(f"no room beside {type(sparse)} and {type(opaque)}")
            return tensor

        def scope(self, prefix):
            return self

    recovery = Recovery(model, lambda incident: None)
    with torch.inference_mode(), tapping(model, Sparse()):
        recovery.step(random_ids(1, PROMPT))
    assert [incident.is_recovered for incident in recovery.incidents] == [True]


def test_a_failed_request_is_dropped_before_the_others_go_on():
    model, alive = MODELS["mini"], []
    _, counting = undisturbed_requests()

    def caches() -> int:
        return sum(type(x) is Cache for x in gc.get_objects())

    gc.collect()
    before = caches()
    with Failing(model, 2, 0.5, {4, 5}, counting.counts):
        hook = model.register_forward_pre_hook(lambda *_: alive.append(caches() - before))
        outcomes = serve_requests(model, requests(), recovery=Recovery(model, print))
        hook.remove()
    assert outcomes[1].reason == "out_of_memory"
    assert alive[:6] == [0, 1, 2, 3, 3, 3] and alive[6:12] == [2] * 6


# ---- what is taken for out of memory, and what is not


def wrapped(cause: BaseException) -> RuntimeError:
    error = RuntimeError("backend torch_sorted failed")
    error.__cause__ = cause
    return error


CPU_TEXT = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "4000000000000000 bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.mark.parametrize(
    "make",
    [lambda: torch.OutOfMemoryError("CUDA out of memory"), MemoryError, lambda: RuntimeError(CPU_TEXT),
     lambda: wrapped(MemoryError("x")), lambda: wrapped(wrapped(RuntimeError(CPU_TEXT)))],
)  # fmt: skip
def test_every_form_of_out_of_memory_is_recovered(make):
    assert is_out_of_memory(make())
    model = MODELS["mini"]
    expected, _, counting = undisturbed("mini")
    recovery = Recovery(model, print)
    found, _ = passes(model, random_ids(1, PROMPT), Failing(model, 1, 0.5, {1}, counting.counts, make), recovery)
    assert torch.equal(found[-1], expected[-1]) and len(recovery.incidents) == 1


def test_torch_still_says_what_is_looked_for():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**15)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize(
    "make",
    [lambda: RuntimeError("CUDA error: an illegal memory access was encountered"), lambda: ValueError("x"),
     lambda: NonFiniteError("NaN"), KeyboardInterrupt, lambda: wrapped(ValueError("out of memory"))],
)  # fmt: skip
def test_other_errors_are_passed_on_at_once(make):
    model = MODELS["mini"]
    _, _, counting = undisturbed("mini")
    recovery = Recovery(model, print)
    failing = Failing(model, None, 0.0, {1}, counting.counts, make)  # outside of any backend, which would wrap it
    with pytest.raises(type(make())) as caught:
        passes(model, random_ids(1, PROMPT), failing, recovery)
    assert caught.value is failing.raised[0] and recovery.incidents == [] and failing.attempt == 1


def test_a_chain_that_bites_its_tail_ends():
    first, second = RuntimeError("a"), RuntimeError("b")
    first.__cause__, second.__cause__ = second, first
    assert not is_out_of_memory(first)
    drop_frames(first)


# ---- settings, reports


def test_a_draw_is_repeated_with_the_same_number(monkeypatch):
    model, drawn = MODELS["mini"], []
    settings = {"temperature": 1.5, "seed": 9}
    expected = serve_requests(model, requests(**settings))
    original = module.sample

    def sample(logits, **named):
        token = original(logits, **named)
        drawn.append(token)
        if len(drawn) == 5:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return token

    monkeypatch.setattr(module, "sample", sample)
    recovery = Recovery(model, print)
    assert serve_requests(model, requests(**settings), recovery=recovery) == expected
    assert [incident.layer for incident in recovery.incidents] == [None]


def test_without_a_listener_a_warning_tells():
    model = MODELS["mini"]
    _, _, counting = undisturbed("mini")
    expected = (
        r"^out of memory in layers\.02, op \w+, backend torch_\w+ \(workbench\.kernels\.\w+\.torch_\w+\.\w+:\d+\), "
        r"1 x 70 tokens: rolled back and run again, with success: OutOfMemoryError: CUDA out of memory"
    )
    with pytest.warns(RecoveryWarning, match=expected):
        with Failing(model, 2, 0.5, {0}, counting.counts):
            Recovery(model).step(random_ids(1, PROMPT), use_cache=False)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({"max_new_tokens": 0}, "max_new_tokens"), ({"temperature": -1.0}, "temperature"), ({"stop_ids": 3}, "stop_ids"),
     ({"input_ids": random_ids(2, 5)}, "expected one prompt")],
)  # fmt: skip
def test_unusable_settings_are_told_before_anything_runs(changes, expected):
    model, streamed = MODELS["mini"], []
    bad = Request(**{"input_ids": random_ids(1, 5), "max_new_tokens": 2, **changes})
    with pytest.raises(InputError, match=expected):
        serve_requests(model, [*requests(), bad], stream=lambda *token: streamed.append(token))
    assert streamed == []


def test_unusable_input_of_a_step_is_the_models_error():
    model = MODELS["mini"]
    with torch.inference_mode():
        cache = model(random_ids(1, 5)).cache
        with pytest.raises(InputError, match="input_ids"):
            Recovery(model).step(torch.tensor(3), cache=cache)


# ---- a real failure


REAL = """
import gc, resource, sys
import torch
sys.path.insert(0, "tests")
from models import mini
from workbench.config import ModelConfig
from workbench.kernels import Kernels
from workbench.memory_table import _status
from workbench.model import CausalLM
from workbench.recovery import Recovery, Request, serve_requests

model = CausalLM(ModelConfig.from_hf(mini(initializer_range=0.1)), Kernels({"attention": "reference"})).init_weights(0)
ids = torch.randint(0, 97, (1, 1500), generator=torch.Generator().manual_seed(0))
asked = [Request(input_ids=ids[:, :40], max_new_tokens=3), Request(input_ids=ids, max_new_tokens=3)]
expected = serve_requests(model, asked)
gc.collect()
gc.disable()
resource.setrlimit(resource.RLIMIT_AS, (_status("VmSize") + 600 * 2**20,) * 2)

class Ballast:
    def __init__(self):
        self.itself, self.memory = self, torch.empty(560 * 2**20, dtype=torch.uint8)

ballast = Ballast()
if sys.argv[1] == "garbage":
    del ballast  # a cycle: nothing but a collection frees it
told = []
found = serve_requests(model, asked, recovery=Recovery(model, told.append))
assert [incident.is_recovered for incident in told] == [sys.argv[1] == "garbage"], told
assert told[0].layer == 3 and told[0].op == "attention" and "DefaultCPUAllocator" in told[0].error, told
assert found[0] == expected[0]
if sys.argv[1] == "garbage":
    assert found[1] == expected[1]
else:
    rows = {row.what: row.n_bytes for row in found[1].failure.table.rows}
    assert found[1].reason == "out_of_memory" and found[1].tokens == []
    assert rows["limit of the address space"] == resource.getrlimit(resource.RLIMIT_AS)[0]
    assert rows["address space in use"] < rows["limit of the address space"]
print("well")
"""


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="needs a limit of the address space, as Linux has")
@pytest.mark.parametrize("ballast", ["garbage", "held"])
def test_a_real_failure_of_the_allocator(ballast):
    """Under a limit of the address space: saved by the collection, or one request fails and the other does not."""
    done = subprocess.run(
        [sys.executable, "-c", REAL, ballast], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0 and done.stdout == "well\n", done.stderr


# ---- the command line


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return write_small_checkpoint(tmp_path_factory.mktemp("recovery") / "checkpoint")


@pytest.mark.parametrize("is_json", [False, True])
@pytest.mark.parametrize("failures", [0, 1, 2])
def test_generate_tells_of_a_recovery_and_ends_with_1_after_two_failures(
    capsys, monkeypatch, checkpoint, failures, is_json
):
    original, calls = DecoderLayer.forward, []

    def forward(self, *args):
        calls.append(self)
        if 10 <= len(calls) < 10 + failures:  # in the third pass of four layers; then at once in the next
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return original(self, *args)

    command = ["generate", str(checkpoint), "--prompt", "To be", "--max-new-tokens", "5"]
    command += ["--json"] if is_json else []
    assert cli.main(command) == 0
    plain = capsys.readouterr()
    assert plain.err == ""
    monkeypatch.setattr(DecoderLayer, "forward", forward)
    code = cli.main(command)
    out, err = capsys.readouterr()
    assert code == (1 if failures == 2 else 0)
    if failures < 2:
        lines = err.splitlines()
        assert len(lines) == failures
        assert all(line.startswith("workbench: note: out of memory in ") for line in lines)
        assert all("rolled back and run again, with success" in line for line in lines)
    else:
        error, title, *rows = err.splitlines()
        assert error.startswith("workbench: error: out of memory in ") and title == "memory of cpu (CPU)"
        assert any(row.split()[0] == "weights" for row in rows)
    if not is_json:
        assert out == plain.out if failures < 2 else plain.out.startswith(out.rstrip("\n")) and out.endswith("\n")
        return
    found, expected = json.loads(out), json.loads(plain.out)
    assert found["tokens"] == expected["tokens"][: 2 if failures == 2 else 5]
    assert [incident["is_recovered"] for incident in found["out_of_memory"]] == [failures == 1] * (failures > 0)
    assert (found["memory"] is not None, found["reason"] == "out_of_memory") == (failures == 2, failures == 2)
