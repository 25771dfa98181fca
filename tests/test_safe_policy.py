"""The safe policy over a thousand generated inputs, valid extremes among them: finite, right, gradients too."""

import collections
import dataclasses

import hypothesis
import hypothesis.strategies as st
import torch

from workbench.kernels import gated_delta_rule
from workbench.kernels.agreement import relative_error
from workbench.kernels.gated_delta_rule import spec
from workbench.kernels.gated_delta_rule.reference import oracle
from workbench.killer_inputs import LIMIT, VALID_EXTREMES
from workbench.numerics import ACCURATE_SOLVERS, PRESETS, SMALLEST_NORMAL

EXAMPLES = 1000

GATES = st.one_of(
    st.floats(-100.0, 0.0, width=32),
    st.sampled_from([0.0, -0.0, -1e-45, -1e-6, -1e-3, -1.39, -20.0, -72.0, -88.72, -88.73, -103.98, -1e4, -1e8]),
)
BETAS = st.one_of(st.floats(0.0, 1.0, width=32), st.sampled_from([0.0, 1e-30, 0.5, 0.835, 0.9999, 1.0]))
#: How much of every key is the first one's: 0 random, 1 repeated.
CORRELATIONS = st.sampled_from([0.0, 0.0, 0.5, 0.9, 1.0])
HEADS = st.sampled_from([(1, 1), (1, 3), (2, 4)])


@st.composite
def own_inputs(draw) -> dict:
    """A few gates and betas spread over tokens and heads, keys from random to repeated, with and without a state.

    Not of a few numbers: where q meets k at a right angle by chance, a result of one number is the rounding of its
    terms, in the recurrence too, and an error relative to the result has no bound.
    """
    tokens, (key_heads, value_heads), seed = draw(st.integers(4, 100)), draw(HEADS), draw(st.integers(0, 9999))
    inputs = spec.example(
        tokens=tokens, key_heads=key_heads, value_heads=value_heads, key_dim=draw(st.sampled_from([4, 16])),
        value_dim=draw(st.sampled_from([8, 12])), seed=seed,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)

    def spread(values: list[float]) -> torch.Tensor:
        chosen = torch.randint(len(values), (1, tokens, value_heads), generator=generator)
        return torch.tensor(values, dtype=torch.float32)[chosen]

    inputs["log_decay"] = spread(draw(st.lists(GATES, min_size=1, max_size=4)))
    inputs["beta"] = spread(draw(st.lists(BETAS, min_size=1, max_size=3)))
    share = draw(CORRELATIONS)
    mixture = share * inputs["k"][:, :1] + (1 - share) * inputs["k"]
    inputs["k"] = torch.nn.functional.normalize(mixture, dim=-1)
    sequences = 1
    if draw(st.booleans()):
        cuts = sorted(draw(st.lists(st.integers(0, tokens), max_size=3)))
        inputs["cu_seqlens"] = torch.tensor([0, *cuts, tokens])
        sequences = len(cuts) + 1
    if draw(st.booleans()):
        shape = (sequences, value_heads, inputs["k"].shape[-1], inputs["v"].shape[-1])
        inputs["initial_state"] = torch.randn(shape, generator=generator)
    return inputs


EXTREMES = st.builds(
    lambda name, tokens, seed: (name, VALID_EXTREMES[name].make(tokens, seed)),
    st.sampled_from(sorted(VALID_EXTREMES)), st.integers(8, 150), st.integers(0, 9999),
)  # fmt: skip
POLICIES = st.builds(
    lambda chunk, solver: dataclasses.replace(PRESETS["safe"], chunk=chunk, solver=solver),
    st.sampled_from([64, 64, 4, 16, 7]), st.sampled_from([PRESETS["safe"].solver, *ACCURATE_SOLVERS]),
)  # fmt: skip


def error_of(x: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative error; where the entries are subnormal, and lack bits for it, relative to the smallest normal number."""
    smallest = SMALLEST_NORMAL["float32"] * exact.numel() ** 0.5
    size = torch.linalg.vector_norm(exact).item()
    return relative_error(x, exact) if size >= smallest else (x.double() - exact).norm().item() / smallest


def assert_safe(inputs: dict, policy) -> None:
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items() if name != "cu_seqlens"}
    found = gated_delta_rule(**(inputs | leaves), policy=policy, backend="torch_chunk")
    for what, x, exact in zip(("output", "state"), found, oracle(**inputs), strict=True):
        assert bool(torch.isfinite(x).all()), f"{what} is not finite"
        error = error_of(x, exact)
        assert error <= LIMIT, f"{what} is off by {error:.1e}"
    (found[0].sum() + found[1].square().sum()).backward()
    for name, leaf in leaves.items():
        assert bool(torch.isfinite(leaf.grad).all()), f"gradient of {name} is not finite"


def test_the_safe_policy_holds_on_a_thousand_inputs_and_every_valid_extreme():
    seen: collections.Counter[str] = collections.Counter()

    @hypothesis.settings(max_examples=EXAMPLES, suppress_health_check=[hypothesis.HealthCheck.too_slow])
    @hypothesis.given(case=st.one_of(own_inputs().map(lambda x: ("own", x)), EXTREMES), policy=POLICIES)
    def holds(case, policy):
        name, inputs = case
        seen[name] += 1
        assert_safe(inputs, policy)

    holds()
    print(dict(seen))
    assert seen.total() >= EXAMPLES and seen["own"] >= EXAMPLES // 4
    assert set(VALID_EXTREMES) <= set(seen)
