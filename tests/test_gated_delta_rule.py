"""The gated delta rule: the arbiter against a plainer one, policies, solvers and chunks, splits, stages, refusals.

That every backend keeps the contract is test_conformance's. The bounds hold for the whole tensor
(`agreement.relative_error`): 3e-6 in fp32 on inputs that are valid and extreme, 1e-12 in fp64. Where the forms that are
kept to show a fault show it: test_overflow_thresholds.
"""

import functools
import itertools
import math

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from torch import Tensor

from workbench import taps
from workbench.errors import BackendError, InputError
from workbench.kernels import Kernels, gated_delta_rule
from workbench.kernels.agreement import relative_error
from workbench.kernels.gated_delta_rule import reference, spec
from workbench.kernels.gated_delta_rule.cases import LIMIT_FP64, PACKED, random_state
from workbench.kernels.gated_delta_rule.extremes import LIMIT, VALID_EXTREMES
from workbench.kernels.registry import OPERATIONS, Call
from workbench.numerics import ACCURATE_SOLVERS, EXPONENT_FORMS, PRESETS, NumericsPolicy

ACCURATE = {"safe": "float64", "segsum": "segsum"}
CHUNKS = (16, 32, 64, 128)
INPUTS = ("q", "k", "v", "log_decay", "beta")

Result = tuple[Tensor, Tensor]


def served_here(name: str) -> bool:
    call = Call(spec.OP, "cpu", torch.float32, 128, False, False, NumericsPolicy())
    return OPERATIONS[spec.OP].backends[name].refusal(call) is None


#: Every backend that can run where the tests run; one that is added later is held to the same.
BACKENDS = [name for name in OPERATIONS[spec.OP].backends if served_here(name)]


def run(inputs: dict, backend: str = "torch_chunk", policy=None, **more) -> Result:
    return gated_delta_rule(**inputs, **more, backend=backend, policy=policy)


def errors(found: Result, expected: Result) -> tuple[float, float]:
    return relative_error(found[0], expected[0]), relative_error(found[1], expected[1])


def assert_same(found: Result, expected: Result, limit: float = LIMIT) -> None:
    out, state = errors(found, expected)
    assert out <= limit and state <= limit, f"output {out:.1e}, state {state:.1e}, limit {limit:.1e}"


@functools.cache
def extreme(name: str, tokens: int) -> tuple[dict, Result]:
    """An extreme input and what the arbiter makes of it."""
    inputs = VALID_EXTREMES[name].make(tokens, 0)
    return inputs, reference.oracle(**inputs)


def example(**kwargs) -> dict:
    """`spec.example` in fp64, gates included."""
    return {name: x.double() for name, x in spec.example(**kwargs).items()}


def part_of(inputs: dict, start: int, stop: int) -> dict:
    return {name: x[:, start:stop] if name in INPUTS else x for name, x in inputs.items()}


def bad_rows(out: Tensor) -> list[int]:
    """Tokens of the first sequence with a NaN or Inf in any head."""
    return (~torch.isfinite(out[0])).flatten(1).any(1).nonzero().flatten().tolist()


# ---- the arbiter


def by_hand(q, k, v, log_decay, beta, state) -> tuple[np.ndarray, np.ndarray]:
    """One sequence, one head, number by number: q, k [T, K], v [T, W], log_decay, beta [T], state [K, W]."""
    out, state = np.zeros(v.shape), state.copy()
    (tokens, width), depth = v.shape, k.shape[1]
    for t in range(tokens):
        decay = math.exp(log_decay[t])
        for c in range(width):
            column = [decay * state[r, c] for r in range(depth)]
            read = sum(column[r] * k[t, r] for r in range(depth))
            for r in range(depth):
                state[r, c] = column[r] + k[t, r] * beta[t] * (v[t, c] - read)
            out[t, c] = sum(state[r, c] * q[t, r] for r in range(depth))
    return out, state


@pytest.mark.parametrize(("key_heads", "value_heads"), [(1, 1), (2, 4), (1, 3)])
def test_the_arbiter_is_the_recurrence_number_by_number(key_heads, value_heads):
    inputs = spec.example(
        batch=2, tokens=9, key_heads=key_heads, value_heads=value_heads, key_dim=3, value_dim=5, seed=1
    )
    initial = random_state(2, inputs)
    out, state = reference.oracle(**inputs, initial_state=initial)
    assert out.dtype == state.dtype == torch.float64
    wide = {name: x.double().numpy() for name, x in inputs.items()}
    for b in range(2):
        for h in range(value_heads):
            reads = h // (value_heads // key_heads)
            expected = by_hand(
                wide["q"][b, :, reads], wide["k"][b, :, reads], wide["v"][b, :, h],
                wide["log_decay"][b, :, h], wide["beta"][b, :, h], initial[b, h].double().numpy(),
            )  # fmt: skip
            assert np.abs(out[b, :, h].numpy() - expected[0]).max() < 1e-13
            assert np.abs(state[b, h].numpy() - expected[1]).max() < 1e-13


def test_one_write_and_one_read_by_arithmetic():
    """beta 1 writes v under a unit key; the next token reads it, halved by its gate, and overwrites none."""
    one, two = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    inputs = {
        "q": torch.stack([one, one])[None, :, None],
        "k": torch.stack([one, two])[None, :, None],
        "v": torch.tensor([[3.0, -1.0, 2.0], [10.0, 10.0, 10.0]])[None, :, None],
        "log_decay": torch.tensor([0.0, math.log(0.5)])[None, :, None],
        "beta": torch.tensor([1.0, 0.25])[None, :, None],
    }
    for backend in BACKENDS:
        out, state = run(inputs, backend)
        expected = torch.tensor([[3.0, -1.0, 2.0], [1.5, -0.5, 1.0]])
        torch.testing.assert_close(out[0, :, 0], expected)
        torch.testing.assert_close(state[0, 0], torch.tensor([[1.5, -0.5, 1.0], [2.5, 2.5, 2.5]]))


# ---- accuracy on valid extremes


@pytest.mark.parametrize("tokens", [130, 320])
@pytest.mark.parametrize("name", VALID_EXTREMES)
def test_accurate_differences_hold_on_extremes_for_every_chunk_and_solver(name, tokens):
    inputs, expected = extreme(name, tokens)
    for cumsum in ACCURATE.values():
        for chunk in CHUNKS:
            for solver in ACCURATE_SOLVERS:
                policy = NumericsPolicy(cumsum=cumsum, chunk=chunk, solver=solver)
                out, state = errors(run(inputs, policy=policy), expected)
                assert max(out, state) <= LIMIT, f"{cumsum} chunk {chunk} {solver}: {out:.1e} {state:.1e}"


@pytest.mark.parametrize("name", VALID_EXTREMES)
def test_every_backend_holds_on_extremes_of_2048_tokens(name):
    inputs, expected = extreme(name, 2048)
    measured = {"reference": max(errors(tuple(x.float() for x in expected), expected))}  # which is the arbiter, rounded
    for backend in BACKENDS[1:]:
        for policy in ACCURATE if backend == "torch_chunk" else ["safe"]:
            measured[f"{backend}:{policy}"] = max(errors(run(inputs, backend, policy), expected))
    beside = max(errors(run(inputs, policy="fp32_cumsum"), expected))
    row = ", ".join(f"{who} {error:.1e}" for who, error in measured.items())
    print(f"\n{name}: {row}, beside them fp32_cumsum {beside:.1e}")
    assert all(error <= LIMIT for error in measured.values()), row


@pytest.mark.parametrize("tokens", [130, 320, 2048])
@pytest.mark.parametrize("name", ["mixed_decay", "sparse_resets", "spikes"])
def test_differences_of_an_fp32_cumsum_are_worse_where_strong_and_weak_gates_mix(name, tokens):
    inputs, expected = extreme(name, tokens)
    accurate = {policy: max(errors(run(inputs, policy=policy), expected)) for policy in ACCURATE}
    cancelled = max(errors(run(inputs, policy="fp32_cumsum"), expected))
    assert cancelled > 1.5e-6
    assert all(cancelled > 5 * error for error in accurate.values()), (accurate, cancelled)


@pytest.mark.parametrize("solver", ACCURATE_SOLVERS)
@pytest.mark.parametrize("chunk", [1, 2, 7, 8, 9, 24, 31, 33, 44, 45, 63, 65, 100, 1024])
def test_any_chunk_gives_the_same(chunk, solver):
    inputs = example(tokens=101, batch=2, seed=4)
    initial = random_state(2, inputs)
    expected = reference.oracle(**inputs, initial_state=initial)
    for cumsum in ("float64", "float32", "segsum"):
        policy = NumericsPolicy(chunk=chunk, solver=solver, cumsum=cumsum)
        assert_same(run(inputs, policy=policy, initial_state=initial), expected, LIMIT_FP64)


@pytest.mark.parametrize("form", EXPONENT_FORMS)
def test_every_exponent_form_is_right_where_nothing_overflows(form):
    inputs = example(tokens=130, log_decay=-0.3, seed=6)
    policy = NumericsPolicy(exponent=form, cumsum="float32")
    assert_same(run(inputs, policy=policy), reference.oracle(**inputs), LIMIT_FP64)


# ---- dtypes, memory layout


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs_are_widened_before_anything_is_computed(backend, dtype):
    """One rounding: the output's. The state is fp32 and as good as for fp32 inputs of the same values."""
    inputs = spec.example(tokens=130, dtype=dtype, seed=8)
    assert inputs["log_decay"].dtype == torch.float32
    expected = reference.oracle(**inputs)
    out, state = run(inputs, backend)
    assert out.dtype == dtype and state.dtype == torch.float32
    assert relative_error(state, expected[1]) <= LIMIT
    assert relative_error(out, expected[0]) <= torch.finfo(dtype).eps / 2
    wide = run({name: x.float() for name, x in inputs.items()}, backend)
    assert torch.equal(out, wide[0].to(dtype)) and torch.equal(state, wide[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_state_in_float64_is_a_policy(backend):
    policy = NumericsPolicy(state_dtype="float64")
    inputs = spec.example(tokens=130, seed=9)
    out, state = run(inputs, backend, policy)
    assert out.dtype == torch.float32 and state.dtype == torch.float64
    assert relative_error(state, reference.oracle(**inputs)[1]) <= LIMIT_FP64


# ---- packed sequences, splits


@pytest.mark.parametrize("with_state", [False, True], ids=["from zero", "from a state"])
@pytest.mark.parametrize("lengths", PACKED.values(), ids=PACKED)
@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_sequences_equal_single_runs(backend, lengths, with_state):
    inputs = example(tokens=sum(lengths), log_decay=None, seed=11)
    initial = random_state(len(lengths), inputs) if with_state else None
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    out, state = run(inputs, backend, initial_state=initial, cu_seqlens=bounds)
    assert state.shape == (len(lengths), 4, 16, 24)
    for s, (start, stop) in enumerate(itertools.pairwise(bounds.tolist())):
        entered = None if initial is None else initial[s : s + 1]
        if start == stop:
            assert torch.equal(state[s], torch.zeros_like(state[s]) if initial is None else initial[s])
            continue
        single = run(part_of(inputs, start, stop), backend, initial_state=entered)
        assert_same((out[:, start:stop], state[s : s + 1]), single, LIMIT_FP64)


def test_without_boundaries_a_packed_sequence_reads_its_neighbour():
    inputs = example(tokens=100, log_decay=-0.05, seed=12)
    whole, _ = run(inputs)
    packed, _ = run(inputs, cu_seqlens=torch.tensor([0, 37, 100]))
    assert relative_error(whole[:, :37], packed[:, :37]) <= LIMIT_FP64
    assert relative_error(whole[:, 37:38], packed[:, 37:38]) > 0.1


@pytest.mark.parametrize("backend", BACKENDS)
@hypothesis.settings(max_examples=25)
@hypothesis.given(
    tokens=st.integers(2, 150), seed=st.integers(0, 99), chunk=st.sampled_from([16, 64, 100]), data=st.data()
)
def test_split_anywhere_equals_whole(backend, tokens, seed, chunk, data):
    inputs = example(tokens=tokens, seed=seed, log_decay=data.draw(st.sampled_from([None, -0.01, -3.0])))
    policy = NumericsPolicy(chunk=chunk)
    cuts = sorted({0, tokens, *data.draw(st.lists(st.integers(1, tokens - 1), min_size=1, max_size=3))})
    outs, state = [], None
    for start, stop in itertools.pairwise(cuts):
        out, state = run(part_of(inputs, start, stop), backend, policy, initial_state=state)
        outs.append(out)
    assert_same((torch.cat(outs, dim=1), state), run(inputs, backend, policy), LIMIT_FP64)


def test_a_state_that_is_not_handed_on_shows():
    inputs, expected = extreme("correlated_keys", 130)
    for cut in (1, 63, 64, 65, 129):
        out, _ = run(part_of(inputs, cut, 130))
        assert relative_error(out, expected[0][:, cut:]) > 0.05


def test_a_state_with_its_axes_swapped_shows():
    """Square heads, so that no shape protects: the decode step goes on from the transposed state."""
    inputs = example(tokens=65, key_dim=16, value_dim=16, log_decay=-0.05, seed=13)
    expected, _ = run(inputs)
    _, state = run(part_of(inputs, 0, 64))
    last = part_of(inputs, 64, 65)
    assert relative_error(run(last, initial_state=state)[0], expected[:, 64:]) <= LIMIT_FP64
    assert relative_error(run(last, initial_state=state.transpose(2, 3))[0], expected[:, 64:]) > 0.3


# ---- gradients


GRADIENT_POLICIES = {
    f"{cumsum} {solver}": NumericsPolicy(cumsum=cumsum, solver=solver, chunk=4)
    for cumsum in ("float64", "float32", "segsum")
    for solver in ACCURATE_SOLVERS
}


@pytest.mark.parametrize("packed", [False, True], ids=["one", "packed"])
@pytest.mark.parametrize("case", ["reference", "torch_recurrent", *GRADIENT_POLICIES])
def test_gradients_equal_finite_differences(case, packed):
    backend = case if case in BACKENDS else "torch_chunk"
    inputs = example(tokens=7, key_heads=1, value_heads=2, key_dim=2, value_dim=3, seed=14)
    bounds = torch.tensor([0, 1, 1, 7]) if packed else None
    inputs["initial_state"] = random_state(3 if packed else 1, inputs)
    names = list(inputs)
    values = [inputs[name].requires_grad_() for name in names]

    def function(*tensors: Tensor) -> Result:
        named = dict(zip(names, tensors, strict=True))
        return run(named, backend, GRADIENT_POLICIES.get(case), cu_seqlens=bounds)

    assert torch.autograd.gradcheck(function, values, fast_mode=True)


def gradients(inputs: dict, backend: str, policy) -> dict[str, Tensor]:
    """Of a weighted output and state, for every tensor but the boundaries."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items() if name != "cu_seqlens"}
    out, state = run(inputs | leaves, backend, policy)
    weight = torch.linspace(-1.0, 1.0, out.numel(), dtype=out.dtype).view_as(out)
    ((out * weight).sum() + state.square().sum() / 2).backward()
    return {name: x.grad for name, x in leaves.items()}


@pytest.mark.parametrize("name", VALID_EXTREMES)
def test_gradients_are_finite_and_right_on_extremes(name):
    inputs, _ = extreme(name, 130)
    wide = {n: x.double() if x.is_floating_point() else x for n, x in inputs.items()}
    expected = gradients(wide, "reference", None)
    for backend, policy in (("torch_chunk", "safe"), ("torch_chunk", "segsum"), ("torch_recurrent", None)):
        for tensor, gradient in gradients(inputs, backend, policy).items():
            error = relative_error(gradient, expected[tensor])
            # A gate's gradient is a sum of terms of both signs that nearly cancel: it keeps fewer digits.
            limit = 1e-3 if tensor == "log_decay" else 1e-5
            assert error <= limit, f"{backend} {policy} {tensor}: {error:.1e}"


# ---- gates that forget everything


def with_reset(gate: float) -> tuple[dict, Result]:
    """-0.1 but for `gate` at token 77, which forgets all, and the arbiter's answer."""
    inputs = spec.example(tokens=128, log_decay=-0.1)
    inputs["log_decay"][0, 77] = gate
    return inputs, reference.oracle(**inputs)


def test_a_gate_of_minus_infinity_resets_the_recurrence_and_is_nan_in_chunks():
    """exp(-inf) is 0. In chunks -inf - (-inf) is NaN from their start on; a segment sum has no such term.

    The public op refuses it, and what the refusal says to pass gives what was meant; models call without that check.
    """
    inputs, expected = with_reset(-math.inf)

    def called_by_a_model(inputs, backend="torch_chunk", policy=None):
        return Kernels({spec.OP: backend}, policy).gated_delta_rule(**inputs)

    first, second = part_of(inputs, 0, 77), part_of(inputs, 77, 128)
    second["log_decay"] = torch.full_like(second["log_decay"], -0.1)
    before, after = run(first), run(second)  # what follows the reset knows nothing of what went before it
    assert_same((torch.cat([before[0], after[0]], dim=1), after[1]), expected)
    assert_same(called_by_a_model(inputs, "torch_recurrent"), expected)
    assert_same(called_by_a_model(inputs, policy="segsum"), expected)
    assert bad_rows(called_by_a_model(inputs)[0]) == list(range(64, 128))
    for backend in BACKENDS:
        with pytest.raises(InputError, match=r"found -inf at batch row 0, token 77, head 0, 4 of 512; .* such as -1e4"):
            run(inputs, backend)
        said = inputs | {"log_decay": inputs["log_decay"].clamp(min=-1e4)}
        assert_same(run(said, backend), expected)


def test_how_strong_a_reset_may_be():
    """A cumulative sum in float64 keeps the gates behind a reset of 1e9 nats, not 1e16; segment sums do."""
    for policy in ACCURATE:
        inputs, expected = with_reset(-1e9)
        assert_same(run(inputs, policy=policy), expected)
    inputs, expected = with_reset(-1e16)
    assert max(errors(run(inputs, policy="safe"), expected)) > 0.01
    assert_same(run(inputs, policy="segsum"), expected)
    assert_same(run(inputs, "torch_recurrent"), expected)


# ---- tap points


STAGES = (
    taps.GDN_CUMSUM, taps.GDN_DECAY, taps.GDN_KKT, taps.GDN_INVERSE, taps.GDN_U, taps.GDN_W, taps.GDN_INTRA,
    taps.GDN_STATE, taps.GDN_INTER,
)  # fmt: skip


class Recorder:
    """Sees every stage; `change` maps a name to a function whose result the computation shall go on with."""

    def __init__(self, **change):
        self.change = {f"gdn.{name}": function for name, function in change.items()}
        self.names: list[str] = []
        self.seen: dict[str, Tensor] = {}
        self.used: dict[str, Tensor] = {}

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        self.names.append(name)
        self.seen[name] = tensor.clone()
        tensor = self.change[name](tensor) if name in self.change else tensor
        self.used[name] = tensor.clone()
        return tensor

    def scope(self, prefix: str) -> "Recorder":
        return self


def tapped_inputs() -> dict:
    inputs = example(batch=2, tokens=37, log_decay=-0.1, seed=16)
    inputs["initial_state"] = random_state(2, inputs)
    return inputs


def in_chunks(x: Tensor) -> Tensor:
    """[2, 37, heads, ...] -> [N, heads, 16, ...]: chunk n of sequence b is number 2 n + b, padding zero."""
    padded = torch.cat([x, x.new_zeros(2, 11, *x.shape[2:])], dim=1)
    return padded.unflatten(1, (3, 16)).transpose(0, 1).flatten(0, 1).transpose(1, 2)


def assert_equations(inputs: dict, tap: Recorder, out: Tensor, state: Tensor) -> None:
    """Each stage, as the tap saw it, from the stages before it as the tap handed them on."""
    seen, used = ({name.removeprefix("gdn."): x for name, x in part.items()} for part in (tap.seen, tap.used))
    q, k = (in_chunks(inputs[name]).repeat_interleave(2, dim=1) for name in ("q", "k"))  # [N, V, C, K]
    v, beta, gates = (in_chunks(inputs[name]) for name in ("v", "beta", "log_decay"))
    beta = beta[..., None]
    lower = torch.ones(16, 16).tril().bool()
    grown = used["cumsum"]
    expected = {
        "cumsum": gates.cumsum(-1),
        "decay": torch.where(lower, grown[..., :, None] - grown[..., None, :], -torch.inf).exp(),
        "kkt": (beta * (k @ k.mT) * used["decay"]).tril(-1),
        "inverse": torch.linalg.inv(torch.eye(16).double() + used["kkt"]),
        "u": used["inverse"] @ (beta * v),
        "w": used["inverse"] @ (beta * grown.exp()[..., None] * k),
        "intra": (q @ k.mT) * used["decay"],
    }
    entered, inters, states, rows = inputs["initial_state"], [], [], []
    for n in range(3):
        here = slice(2 * n, 2 * n + 2)
        correction = used["u"][here] - used["w"][here] @ entered
        inters.append((q * grown.exp()[..., None])[here] @ entered)
        rows.append(used["inter"][here] + used["intra"][here] @ correction)
        last = grown[here][..., -1:, None]
        writers = k[here] * (grown[here][..., -1:] - grown[here])[..., None].exp()
        entered = last.exp() * entered + writers.mT @ correction
        states.append(entered)
    expected |= {"state": torch.cat(states), "inter": torch.cat(inters)}
    for name, value in expected.items():
        assert relative_error(seen[name], value) <= LIMIT_FP64, name
    assert relative_error(out, torch.stack(rows).permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :37]) <= LIMIT_FP64
    assert relative_error(state, states[-1]) <= LIMIT_FP64


CHUNK16 = NumericsPolicy(chunk=16)


@pytest.mark.parametrize("solver", ACCURATE_SOLVERS)
def test_stages_are_emitted_in_order_with_their_shapes_and_equations(solver):
    inputs, tap = tapped_inputs(), Recorder()
    out, state = run(inputs, policy=NumericsPolicy(chunk=16, solver=solver), tap=tap)
    assert tuple(tap.names) == STAGES
    n, v, c, k, w = 6, 4, 16, 16, 24
    shapes = {
        "cumsum": (n, v, c), "decay": (n, v, c, c), "kkt": (n, v, c, c), "inverse": (n, v, c, c),
        "u": (n, v, c, w), "w": (n, v, c, k), "intra": (n, v, c, c), "inter": (n, v, c, w),
        "state": (n, v, k, w),
    }  # fmt: skip
    assert {name.removeprefix("gdn."): tuple(x.shape) for name, x in tap.seen.items()} == shapes
    inverse, kkt = tap.seen[taps.GDN_INVERSE], tap.seen[taps.GDN_KKT]
    eye = torch.eye(16, dtype=torch.float64)
    assert relative_error(inverse @ (eye + kkt), eye.expand_as(kkt)) <= LIMIT_FP64
    assert torch.equal(kkt.triu(), torch.zeros_like(kkt))
    assert torch.equal(tap.seen[taps.GDN_DECAY].triu(1), torch.zeros_like(kkt))
    assert_equations(inputs, tap, out, state)


@pytest.mark.parametrize("stage", [name.removeprefix("gdn.") for name in STAGES if name != taps.GDN_STATE])
def test_an_intervention_changes_everything_after_it(stage):
    inputs = tapped_inputs()
    plain = run(inputs, policy=CHUNK16)
    # Scaled, so that the zeros above diagonals stay zeros, as each stage promises the next.
    tap = Recorder(**{stage: lambda x: 1.5 * x})
    found = run(inputs, policy=CHUNK16, tap=tap)
    assert relative_error(found[0], plain[0]) > 0.01
    reaches_state = stage not in ("intra", "inter")
    assert (relative_error(found[1], plain[1]) > 0.01) == reaches_state
    assert_equations(inputs, tap, *found)


@pytest.mark.parametrize("form", ["torch_chunk", "torch_recurrent", "reference"])
def test_a_state_that_the_tap_replaces_is_handed_on_and_read_by_nothing_before(form):
    inputs = tapped_inputs()
    plain, tap = run(inputs, form), Recorder(state=lambda x: 2.0 * x)
    assert_same(run(inputs, form, tap=tap), (plain[0], 2.0 * plain[1]), LIMIT_FP64)
    assert relative_error(tap.seen[taps.GDN_STATE][-2:], plain[1]) <= LIMIT_FP64


def test_a_replaced_state_goes_to_its_own_packed_sequence():
    """Sequences that end at different steps of the scan, and two without a token, which keep what they had."""
    inputs = example(batch=1, tokens=100, log_decay=-0.1, seed=18)
    inputs |= {"cu_seqlens": torch.tensor([0, 3, 3, 50, 90, 90, 100]), "initial_state": random_state(6, inputs)}
    plain = run(inputs, policy=CHUNK16)
    found = run(inputs, policy=CHUNK16, tap=Recorder(state=lambda x: 2.0 * x))
    factors = torch.tensor([2.0, 1.0, 2.0, 2.0, 1.0, 2.0])[:, None, None, None]
    assert_same(found, (plain[0], factors * plain[1]), LIMIT_FP64)


@pytest.mark.parametrize("policy", ["safe", "segsum", "fp32_cumsum", "factored", "mask_after"])
def test_an_observer_changes_no_bit(policy):
    inputs = spec.example(batch=2, tokens=10 * 64 - 3, log_decay=None, seed=17)
    bounds = torch.tensor([0, 3, 3, 150, 637])
    packed = {name: x[:1] for name, x in inputs.items()}
    for kwargs in ({**inputs}, {**packed, "cu_seqlens": bounds}):
        plain, seen = run(kwargs, policy=policy), run(kwargs, policy=policy, tap=Recorder())
        assert torch.equal(plain[0], seen[0]) and torch.equal(plain[1], seen[1])


def test_a_fault_is_first_seen_at_the_stage_that_makes_it():
    def first_bad(policy: str) -> str | None:
        tap = Recorder()
        run(spec.example(tokens=128, log_decay=-1.39), policy=policy, tap=tap)
        return next((name for name in tap.names if not bool(torch.isfinite(tap.seen[name]).all())), None)

    assert first_bad("factored") == taps.GDN_DECAY == first_bad("factored_mask_after")
    assert first_bad("safe") is None is first_bad("multiply_mask")


# ---- what is refused


def changed(**tensors) -> dict:
    return {**spec.example(tokens=8), **tensors}


def none_of(axis: int) -> dict:
    """Nothing along one axis of every input."""
    return {name: x.narrow(axis, 0, 0) for name, x in changed().items()}


ONE_ROW = "boundaries that do not fall, from 0 to 8, over one batch row"
REFUSED = {
    "q without heads": (changed(q=torch.ones(1, 8, 16)), "expected q [B, T, H, K]", "found (1, 8, 16)"),
    "v without heads": (changed(v=torch.ones(1, 8, 24)), "v [B, T, V, W]", "(1, 8, 24)"),
    "other keys": (
        changed(k=torch.ones(1, 8, 2, 15)),
        "k: expected shape (1, 8, 2, 16), found (1, 8, 2, 15)",
    ),
    "fewer values": (changed(v=torch.ones(1, 7, 4, 24)), "v: expected shape (1, 8, 4, 24)", "(1, 7, 4, 24)"),
    "gate per key head": (changed(log_decay=torch.zeros(1, 8, 2)), "log_decay: expected shape (1, 8, 4)"),
    "gate per channel": (changed(log_decay=torch.zeros(1, 8, 4, 16)), "log_decay: expected shape (1, 8, 4)"),
    "beta of another batch": (
        changed(beta=torch.zeros(2, 8, 4)),
        "beta: expected shape (1, 8, 4)",
        "(2, 8, 4)",
    ),
    "state transposed": (
        changed(initial_state=torch.zeros(1, 4, 24, 16)),
        "initial_state: expected shape (1, 4, 16, 24), found (1, 4, 24, 16)",
    ),
    "one state for two sequences": (
        changed(initial_state=torch.zeros(1, 4, 16, 24), cu_seqlens=torch.tensor([0, 3, 8])),
        "initial_state: expected shape (2, 4, 16, 24), found (1, 4, 16, 24)",
    ),
    "three value heads on two key heads": (
        changed(v=torch.ones(1, 8, 3, 24), log_decay=torch.zeros(1, 8, 3), beta=torch.zeros(1, 8, 3)),
        "expected a multiple of the 2 key heads, found 3",
    ),
    "no token": (none_of(1), "expected at least one token, found 0"),
    "no sequence": (none_of(0), "expected at least one sequence, found 0"),
    "no head": (none_of(2), "expected at least one key head, found 0"),
    "another device": (
        changed(beta=torch.zeros(1, 8, 4, device="meta")),
        "beta: expected device cpu",
        "meta",
    ),
    "whole numbers": (changed(v=torch.ones(1, 8, 4, 24).long()), "floating point", "v torch.int64"),
    "boundaries that fall": (changed(cu_seqlens=torch.tensor([0, 5, 3, 8])), ONE_ROW, "found [0, 5, 3, 8]"),
    "boundaries that stop early": (changed(cu_seqlens=torch.tensor([0, 5])), ONE_ROW, "found [0, 5]"),
    "boundaries that start late": (changed(cu_seqlens=torch.tensor([1, 8])), ONE_ROW, "found [1, 8]"),
    "one boundary": (changed(cu_seqlens=torch.tensor([0])), ONE_ROW, "found [0]"),
    "boundaries over two rows": (
        {**spec.example(batch=2, tokens=8), "cu_seqlens": torch.tensor([0, 8])},
        ONE_ROW,
        "found [0, 8] over 2 rows",
    ),
    "broken boundaries": (
        changed(cu_seqlens=torch.tensor([0.0, 8.0])),
        "expected one axis of integers",
        "torch.float32",
    ),
    "eight bits": (
        changed(k=torch.ones(1, 8, 2, 16).to(torch.float8_e4m3fn)),
        "floating point numbers, dense and of float64, float32, bfloat16, float16, found k torch.float8_e4m3fn",
    ),
    "eight bits everywhere": (
        {name: x.to(torch.float8_e5m2) for name, x in changed().items()},
        "found q torch.float8_e5m2",
    ),
    "complex": (changed(v=torch.ones(1, 8, 4, 24, dtype=torch.complex64)), "found v torch.complex64"),
    "sparse": (changed(beta=torch.zeros(1, 8, 4).to_sparse()), "found beta torch.float32 torch.sparse_coo"),
    "an array for queries": (changed(q=np.ones((1, 8, 2, 16))), "q: expected a tensor, found ndarray"),
    "arrays": ({name: x.numpy() for name, x in changed().items()}, "expected a tensor, found ndarray"),
    "a number for beta": (changed(beta=0.5), "beta: expected a tensor, found float"),
    "no gate": (changed(log_decay=None), "log_decay: expected a tensor, found NoneType"),
    "a list for a state": (changed(initial_state=[0.0]), "initial_state: expected a tensor, found list"),
    "no key channel": (
        changed(q=torch.ones(1, 8, 2, 0), k=torch.ones(1, 8, 2, 0)), "expected at least one key channel, found 0",
    ),
    "no value channel": (changed(v=torch.ones(1, 8, 4, 0)), "expected at least one value channel, found 0"),
    "a list for boundaries": (changed(cu_seqlens=[0, 8]), "cu_seqlens: expected a tensor of integers, found list"),
    "an array for boundaries": (changed(cu_seqlens=np.array([0, 8])), "cu_seqlens: expected a tensor", "ndarray"),
    "truth for boundaries": (changed(cu_seqlens=torch.tensor([False, True])), "expected one axis of integers"),
    "boundaries without data": (changed(cu_seqlens=torch.ones(2, device="meta").long()), "of torch.int64 on meta"),
    "a number for boundaries": (
        changed(cu_seqlens=torch.tensor(8)),
        "expected one axis of integers",
        "shape ()",
    ),
}


@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize("case", REFUSED)
def test_wrong_input_is_refused_in_one_line(case, backend):
    inputs, *words = REFUSED[case]
    with pytest.raises(InputError) as caught:
        run(inputs, backend)
    message = caught.value.args[0]
    assert "\n" not in message and len(message) < 200 and "torch.Size" not in message
    assert all(word in message for word in words), message


def test_named_policies_and_backends_are_what_runs():
    """Under `factored` the same call is NaN; the recurrence has no such form; `reference` is the arbiter."""
    inputs, expected = extreme("strong_decay", 65)
    assert_same(gated_delta_rule(**inputs), expected)
    assert not bool(torch.isfinite(gated_delta_rule(**inputs, policy="factored")[0]).all())
    with pytest.raises(BackendError, match="asks for exponent factored, which only the chunked form has"):
        gated_delta_rule(**inputs, policy="factored", backend="torch_recurrent")
    assert torch.equal(gated_delta_rule(**inputs, backend="reference")[0], expected[0].float())
    assert set(ACCURATE) | {"fp32_cumsum"} <= set(PRESETS)
