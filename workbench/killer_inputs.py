"""Inputs that kill wrong forms of the gated delta rule, where random inputs let them pass. Kinds, kept apart.

`VALID_EXTREMES` (of `kernels.gated_delta_rule`) keep the contract of the op, unit keys, log decay <= 0, beta in [0, 1]:
a correct form is within LIMIT of the arbiter on each of them, and each says which policies it breaks.
`BROKEN_CONTRACTS` do not keep it, or hand over what belongs to somebody else: nothing can compute the right answer from
them, so the fault must be detected, and each says how: by a refusal, by values that are not finite, or by comparison
with the arbiter alone. `EXPERT_EXTREMES` are valid inputs of the routed experts, and `trained_layer` is the hardest
layer of a trained checkpoint, whose shapes are those of any other: what its keys and gates are is nothing that one
would draw.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench import quality, taps
from workbench.dialogue import DATA
from workbench.errors import InputError
from workbench.kernels.agreement import first_bad_row, relative_error
from workbench.kernels.experts import spec as experts_spec
from workbench.kernels.gated_delta_rule import spec
from workbench.kernels.gated_delta_rule.extremes import LIMIT, draw
from workbench.kernels.gated_delta_rule.extremes import VALID_EXTREMES as VALID_EXTREMES
from workbench.kernels.gated_delta_rule.reference import oracle
from workbench.loading import load
from workbench.tokenizer import Tokenizer
from workbench.tracing import trace

#: Keyword arguments of the op: tensors, and a tap where the fault is in what the op makes itself.
Inputs = dict[str, Any]

#: Relative error from which on a result counts as wrong and not as imprecise.
WRONG = 1e-4

OUTCOMES = {
    "right": f"finite, output and state within {LIMIT:g} of the arbiter",
    "imprecise": f"finite, error between {LIMIT:g} and {WRONG:g}",
    "wrong": f"finite, error above {WRONG:g}: only a comparison shows it",
    "not finite": "NaN or Inf in output or state",
    "refused": "InputError, in one line, before anything is computed",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """`kind` (see `OUTCOMES`), the larger error of output and state (inf where not finite, None where refused), the
    first token whose output is not finite, and the message of a refusal."""

    kind: str
    error: float | None = None
    first_bad_row: int | None = None
    message: str = ""


def outcome(run: Callable[..., tuple[Tensor, Tensor]], inputs: Inputs, intended: Inputs | None = None) -> Outcome:
    """What `run(**inputs)` makes of `inputs`, judged by the float64 arbiter on `intended` (on `inputs` where None)."""
    meant = inputs if intended is None else intended
    expected = oracle(**{name: value for name, value in meant.items() if name != "tap"})
    try:
        out, state = run(**inputs)
    except InputError as error:
        return Outcome(kind="refused", message=str(error))
    error = max(relative_error(out, expected[0]), relative_error(state, expected[1]))
    if not (torch.isfinite(out).all() and torch.isfinite(state).all()):
        return Outcome(kind="not finite", error=error, first_bad_row=first_bad_row(out))
    kind = "right" if error <= LIMIT else "imprecise" if error <= WRONG else "wrong"
    return Outcome(kind=kind, error=error)


# ---- broken contracts: what is handed over, and what was meant


def alpha_for_log_alpha(tokens: int, seed: int = 0) -> tuple[Inputs, Inputs]:
    """The decay itself, exp(g) in (0, 1], where its logarithm is expected: every step would grow the state."""
    intended = spec.example(tokens=tokens, seed=seed)
    return intended | {"log_decay": intended["log_decay"].exp()}, intended


def sign_lost(tokens: int, seed: int = 0) -> tuple[Inputs, Inputs]:
    """exp(A_log) softplus(a + dt_bias) without its minus."""
    intended = spec.example(tokens=tokens, seed=seed)
    return intended | {"log_decay": -intended["log_decay"]}, intended


def raw_gate_for_log_decay(tokens: int, seed: int = 0) -> tuple[Inputs, Inputs]:
    """The projection `a` itself, of both signs, with A_log and dt_bias never applied."""
    intended = spec.example(tokens=tokens, seed=seed)
    raw = torch.randn(intended["log_decay"].shape, generator=draw(seed))
    raw[0, 0, 0] = 1.0  # of both signs for one token too
    return intended | {"log_decay": raw}, intended | {"log_decay": -torch.nn.functional.softplus(raw)}


def one_positive_gate(tokens: int, seed: int = 0) -> tuple[Inputs, Inputs]:
    """+1e-3 at one token of one head, which no value of the output would betray."""
    intended = spec.example(tokens=tokens, seed=seed)
    gates = intended["log_decay"].clone()
    gates[0, tokens // 2, 1] = 1e-3
    return intended | {"log_decay": gates}, intended


def alpha_of_zero(tokens: int, seed: int = 0) -> tuple[Inputs, Inputs]:
    """-inf at one token, the logarithm of a decay of exactly 0: right in the recurrence, NaN in chunks."""
    intended = spec.example(tokens=tokens, seed=seed)
    intended["log_decay"][0, tokens // 2, 1] = -1e4
    gates = intended["log_decay"].clone()
    gates[0, tokens // 2, 1] = -torch.inf
    return intended | {"log_decay": gates}, intended


def a_log_in_bf16(tokens: int, seed: int = 0) -> tuple[Inputs, Inputs]:
    """-exp(A_log) softplus(a) with A_log rounded to bf16: A is off by up to 1.5 %, and a state by that of its decay."""
    intended = spec.example(tokens=tokens, seed=seed)
    a_log = (16 * torch.rand(4, generator=draw(seed))).log()
    raw = torch.randn(intended["log_decay"].shape, generator=draw(seed)) - 1
    steps = torch.nn.functional.softplus(raw)
    intended["initial_state"] = torch.randn(1, 4, 16, 24, generator=draw(seed))
    intended["log_decay"] = -a_log.exp() * steps
    return intended | {"log_decay": -a_log.bfloat16().float().exp() * steps}, intended


class Unfilled:
    """A tap that puts NaN in the last row of `name` [.., C, W], as memory that was allocated and not written there."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        if name != self.name:
            return tensor
        found = tensor.clone()
        found[..., -1, :] = torch.nan
        return found

    def scope(self, prefix: str) -> Unfilled:
        return self


def unfilled_u(tokens: int, seed: int = 0) -> tuple[Inputs, Inputs]:
    """U = inverse (beta v) of the chunked form with a row that no kernel wrote, NaN in the place of leftovers."""
    intended = spec.example(tokens=tokens, seed=seed)
    return intended | {"tap": Unfilled(taps.GDN_U)}, intended


def unfilled_w(tokens: int, seed: int = 0) -> tuple[Inputs, Inputs]:
    """The same of W = inverse (beta e^G k): NaN also where the state that it reads is zero."""
    intended = spec.example(tokens=tokens, seed=seed)
    return intended | {"tap": Unfilled(taps.GDN_W)}, intended


def key_heads_tiled(tokens: int, seed: int = 0) -> tuple[Inputs, Inputs]:
    """Value head h reads key head h % H, not h // (V / H): at 2 and 4 heads the first and the last are right."""
    intended = spec.example(tokens=tokens, seed=seed)
    return intended | {name: intended[name].repeat(1, 1, 2, 1) for name in ("q", "k")}, intended


def unfilled_state(tokens: int, seed: int = 0) -> tuple[Inputs, Inputs]:
    """A state that was allocated and never written, NaN in the place of leftovers: the first request alone is bad."""
    intended = spec.example(tokens=tokens, seed=seed)
    return intended | {"initial_state": torch.full((1, 4, 16, 24), torch.nan)}, intended


def unfilled_rows(tokens: int, seed: int = 0) -> tuple[Inputs, Inputs]:
    """The last row of v, scratch memory that a kernel before this one did not reach, NaN in the place of leftovers."""
    intended = spec.example(tokens=tokens, seed=seed)
    values = intended["v"].clone()
    values[:, -1] = torch.nan
    return intended | {"v": values}, intended


def pool_index_minus_one(tokens: int, seed: int = 0) -> tuple[Inputs, Inputs]:
    """A padding index of -1 into a pool of states: it reads the last slot, the state of another request."""
    intended = spec.example(tokens=tokens, log_decay=-0.05, seed=seed)
    pool = torch.randn(3, 4, 16, 24, generator=draw(seed))
    return intended | {"initial_state": pool[torch.tensor([-1])]}, intended


def boundary_minus_one(tokens: int, seed: int = 0) -> tuple[Inputs, Inputs]:
    """A padding entry of -1 behind the boundaries of packed sequences."""
    intended = spec.example(tokens=tokens, seed=seed) | {"cu_seqlens": torch.tensor([0, tokens // 2, tokens])}
    return intended | {"cu_seqlens": torch.tensor([0, tokens // 2, tokens, -1])}, intended


def state_axes_swapped(tokens: int, seed: int = 0) -> tuple[Inputs, Inputs]:
    """A state [W, K] for [K, W] where K = W, so that no shape protects."""
    intended = spec.example(tokens=tokens, log_decay=-0.05, value_dim=16, seed=seed)
    intended["initial_state"] = torch.randn(1, 4, 16, 16, generator=draw(seed))
    return intended | {"initial_state": intended["initial_state"].transpose(2, 3)}, intended


def state_dropped(tokens: int, seed: int = 0) -> tuple[Inputs, Inputs]:
    """The second part of a prompt without the state of the first."""
    intended = spec.example(tokens=tokens, log_decay=-0.05, seed=seed)
    broken = dict(intended)
    intended["initial_state"] = torch.randn(1, 4, 16, 24, generator=draw(seed))
    return broken, intended


@dataclass(frozen=True, kw_only=True, slots=True)
class BrokenContract:
    """`make(tokens, seed)` gives the arguments that are handed over and those that were meant.

    `detected` (see `OUTCOMES`) is how a correct backend lets the fault be seen, from two tokens on: never as `right`.
    `remedy` is what to do about it. `backends` are those that can have the fault, None for all: what is made only in
    chunks is no part of the others.
    """

    make: Callable[[int, int], tuple[Inputs, Inputs]]
    detected: str
    remedy: str
    backends: tuple[str, ...] | None = None

    @property
    def name(self) -> str:
        return self.make.__name__


_CHUNKED = ("torch_chunk", "torch_interleaved")

BROKEN_CONTRACTS: dict[str, BrokenContract] = {
    contract.name: contract
    for contract in (
        BrokenContract(make=alpha_for_log_alpha, detected="refused", remedy="pass the logarithm of the decay"),
        BrokenContract(make=sign_lost, detected="refused", remedy="negate: g = -exp(A_log) softplus(a + dt_bias)"),
        BrokenContract(
            make=raw_gate_for_log_decay, detected="refused", remedy="apply g = -exp(A_log) softplus(a + dt_bias)"
        ),
        BrokenContract(make=one_positive_gate, detected="refused", remedy="find what wrote the one gate"),
        BrokenContract(make=alpha_of_zero, detected="refused", remedy="pass a large finite number such as -1e4"),
        BrokenContract(make=a_log_in_bf16, detected="wrong", remedy="keep A_log and dt_bias in fp32"),
        BrokenContract(
            make=key_heads_tiled, detected="wrong", remedy="repeat_interleave key heads, do not tile them"
        ),
        BrokenContract(make=unfilled_state, detected="not finite", remedy="zero the state of a new sequence"),
        BrokenContract(make=unfilled_rows, detected="not finite", remedy="write every row, or mask what was not"),
        BrokenContract(
            make=unfilled_u, detected="not finite", remedy="write every row of U, padding too", backends=_CHUNKED
        ),
        BrokenContract(
            make=unfilled_w, detected="not finite", remedy="write every row of W, padding too", backends=_CHUNKED
        ),
        BrokenContract(make=pool_index_minus_one, detected="wrong", remedy="mask padding before states are gathered"),
        BrokenContract(make=boundary_minus_one, detected="refused", remedy="cut padding off the boundaries"),
        BrokenContract(make=state_axes_swapped, detected="wrong", remedy="agree on [K, W], keys first"),
        BrokenContract(make=state_dropped, detected="wrong", remedy="hand the state on from part to part"),
    )
}


# ---- routed experts


def dead_experts(tokens: int, seed: int = 0) -> Inputs:
    """Arguments of the op `experts`: two of eight have weights of 1e-23, and every token asks for one of them.

    What they give is below the smallest number of fp32, and right as zero.
    """
    inputs = experts_spec.example(tokens=tokens, seed=seed)
    for name in ("gate_up", "down"):
        inputs[name][:2] *= 1e-23
    inputs["experts"][:, 0] = torch.arange(tokens) % 2
    inputs["experts"][:, 1] = 2 + torch.randint(0, 6, (tokens,), generator=draw(seed))
    return inputs


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertExtreme:
    """`make(tokens, seed)` gives the arguments of the op `experts`. `provokes` is the fault that shows on them."""

    make: Callable[[int, int], Inputs]
    provokes: str

    @property
    def name(self) -> str:
        return self.make.__name__


EXPERT_EXTREMES: dict[str, ExpertExtreme] = {
    extreme.name: extreme
    for extreme in (
        ExpertExtreme(
            make=dead_experts, provokes="a scale of what lies between the two matrices that is zero, and 0 / 0 with it"
        ),
    )
}

#: Largest number of float8_e4m3fn, to which a block is scaled.
E4M3_MAX = 448.0


def block_scaled(x: Tensor, smallest: float = 0.0) -> tuple[Tensor, Tensor]:
    """The last axis in eight bits: q = x / scale in float8_e4m3fn (read back as fp32) and its scale [..., 1] in fp32.

    scale = max(largest magnitude / 448, `smallest`): with `smallest` 0 a block of zeros is 0 / 0.
    """
    scale = (x.abs().amax(-1, keepdim=True) / E4M3_MAX).clamp(min=smallest)
    return (x / scale).to(torch.float8_e4m3fn).float(), scale


def block_scaled_experts(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, *, smallest: float = 0.0
) -> Tensor:
    """The op `experts` as an engine in eight bits evaluates it, a scale for each row of weights and activations.

    Each product is that of the eight-bit numbers times both scales. `smallest` as in `block_scaled`; 0 is the fault
    that `dead_experts` provoke: what lies between the two matrices of such an expert is zero, and its scale too.
    """

    def product(rows: Tensor, matrices: Tensor) -> Tensor:  # [T, A, D] and [T, A, O, D] -> [T, A, O]
        (q_rows, row_scale), (q, scale) = block_scaled(rows, smallest), block_scaled(matrices, smallest)
        return torch.einsum("tad,taod->tao", q_rows, q) * (row_scale * scale.squeeze(-1))

    inner = experts_spec.swiglu(product(x[:, None].expand(-1, experts.shape[1], -1), gate_up[experts]))
    return (weights[..., None] * product(inner, down[experts])).sum(1)


# ---- a trained layer


def kkt_norm(inputs: Inputs, chunk: int = 64) -> float:
    """Largest sum of magnitudes in a row of beta_i (k_i . k_j) exp(G_i - G_j), j < i, of any whole or last chunk.

    In float64. An inverse by a series is as hard as this is large; inputs that are drawn have less than 1.
    """
    k, beta, gates = (inputs[name].double() for name in ("k", "beta", "log_decay"))
    k = k.repeat_interleave(beta.shape[2] // k.shape[2], dim=2)
    largest = 0.0
    for start in range(0, k.shape[1], chunk):
        keys, sums = k[:, start : start + chunk].transpose(1, 2), gates[:, start : start + chunk].cumsum(1)
        sums = sums.transpose(1, 2)
        decay = (sums[..., :, None] - sums[..., None, :]).tril(-1).exp()
        kkt = beta[:, start : start + chunk].transpose(1, 2)[..., None] * (keys @ keys.transpose(-1, -2)) * decay
        largest = max(largest, kkt.tril(-1).abs().sum(-1).max().item())
    return largest


def trained_layer(tokens: int, seed: int = 0, checkpoint: str | Path = DATA / "miniature") -> Inputs:
    """What the gated delta rule of a trained layer gets: of the layer with the largest `kkt_norm`, on held-out text.

    `tokens` tokens from the `seed`-th such stretch of the text. Raises InputError where there is no checkpoint, and
    whatever `load` does for one that is damaged.
    """
    folder = Path(checkpoint)
    if not (folder / "config.json").is_file():
        raise InputError(
            f"trained_layer: expected a checkpoint with a tokenizer in {folder}, found none; what is missing without "
            "it is the one input whose keys and gates were learned; name another with checkpoint="
        )
    model = load(folder, "float32")
    ids = torch.from_numpy(
        quality.heldout_tokens(Tokenizer.from_directory(folder), windows=seed + 1, length=tokens)
    )[seed * tokens :][:tokens]  # fmt: skip
    names = {"q": taps.GDN_Q, "k": taps.GDN_K, "v": taps.GDN_V, "log_decay": taps.GDN_LOG_DECAY, "beta": taps.GDN_BETA}
    with torch.inference_mode(), trace(model, keep=[f"*.{name}" for name in names.values()]) as seen:
        model(ids[None], use_cache=False)
    layers = sorted({taps.split_name(name)[0] for name in seen.tensors})
    found = [
        {name: seen.tensors[taps.full_name(layer, tap)].clone() for name, tap in names.items()} for layer in layers
    ]
    if not found:
        raise InputError(f"trained_layer: expected a model with linear layers, found none in {folder}; name another")
    return max(found, key=kkt_norm)
