"""Choosing tokens: greedy is an argmax of full prefills, sampling has its distribution, faults show."""

import math

import pytest
import torch
from models import mini, mini_dense, mini_next
from torch import Tensor

from workbench.config import ModelConfig
from workbench.errors import InputError, NonFiniteError
from workbench.generation import sample
from workbench.model import CausalLM

BUILDERS = {"mini": mini, "dense": mini_dense, "next": mini_next}


def build(name: str = "mini", **changes) -> CausalLM:
    """Wide weights, for text that does not repeat one token."""
    fields = BUILDERS[name](**{"initializer_range": 0.1, **changes})
    return CausalLM(ModelConfig.from_hf(fields)).init_weights(0).eval()


def random_ids(rows: int, tokens: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 97, (rows, tokens), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return build()


@torch.inference_mode()
def greedy(model: CausalLM, prompt: Tensor, count: int) -> list[int]:
    """The likeliest token after a full prefill of everything so far, `count` times; prompt [1, T]."""
    ids = prompt
    for _ in range(count):
        logits = model(ids, use_cache=False).logits[0, -1]
        best, second = logits.topk(2).values
        assert best - second > 1e-5  # else rounding could pick another one
        ids = torch.cat([ids, logits.argmax().view(1, 1)], dim=1)
    return ids[0, prompt.shape[1] :].tolist()


# ---- greedy


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("tokens", [1, 62, 70])
def test_greedy_is_the_chain_of_argmaxes_of_full_prefills(name, tokens):
    model, prompt = build(name), random_ids(1, tokens)
    out = model.generate(prompt, max_new_tokens=8)
    assert out.sequences == [greedy(model, prompt, 8)]
    assert out.reasons == ["length"]
    assert len(set(out.sequences[0])) > 1  # a chain that repeats one token would prove little


def test_a_batch_gives_what_each_prompt_gives_alone(model):
    prompts = random_ids(3, 20)
    out = model.generate(prompts, max_new_tokens=6)
    assert out.sequences == [greedy(model, row[None], 6) for row in prompts]
    assert len({tuple(ids) for ids in out.sequences}) == 3


@pytest.mark.parametrize("side", ["left", "right", "mixed"])
@pytest.mark.parametrize("mask_dtype", [torch.int64, torch.bool])
def test_padded_prompts_give_what_they_give_alone(model, side, mask_dtype):
    lengths = (5, 66, 1, 23)
    prompts = [random_ids(1, n, seed=n) for n in lengths]
    ids, mask = random_ids(4, 66, seed=99), torch.zeros(4, 66, dtype=mask_dtype)
    for row, prompt in enumerate(prompts):
        start = 66 - prompt.shape[1] if side == "left" or (side == "mixed" and row % 2) else 0
        ids[row, start : start + prompt.shape[1]] = prompt[0]
        mask[row, start : start + prompt.shape[1]] = 1
    out = model.generate(ids, max_new_tokens=6, attention_mask=mask)
    assert out.sequences == [greedy(model, prompt, 6) for prompt in prompts]


def test_a_prompt_has_one_row_of_logits_for_each_sequence(model, monkeypatch):
    shapes, head = [], CausalLM.head
    monkeypatch.setattr(CausalLM, "head", lambda self, x: shapes.append(tuple(x.shape)) or head(self, x))
    mask = torch.ones(2, 50, dtype=torch.int64)
    model.generate(random_ids(2, 50), max_new_tokens=2)
    mask[1, 30:] = 0
    model.generate(random_ids(2, 50), max_new_tokens=2, attention_mask=mask)
    assert shapes == [(2, 1, 64)] * 4


def test_stop_ids_end_their_own_sequence_and_no_other(model):
    prompts = random_ids(3, 20)
    free = [greedy(model, row[None], 12) for row in prompts]
    stop = free[0][2]
    expected, reasons = [], []
    for ids in free:
        end = ids.index(stop) + 1 if stop in ids else 12
        expected.append(ids[:end])
        reasons.append("stop" if stop in ids else "length")
    assert len(expected[0]) <= 3 and reasons.count("length") >= 1
    for stop_ids in ((stop,), [stop, 96], {stop}):
        out = model.generate(prompts, max_new_tokens=12, stop_ids=stop_ids)
        assert out.sequences == expected and out.reasons == reasons
    last = model.generate(prompts[:1], max_new_tokens=free[0].index(stop) + 1, stop_ids=(stop,))
    assert last.reasons == ["stop"]  # found with the last token that was allowed
    for i in range(3):
        assert model.generate(prompts[i : i + 1], max_new_tokens=1, stop_ids=()).sequences == [free[i][:1]]


def test_stream_gets_each_token_once_and_none_after_the_end(model):
    prompts = random_ids(3, 20)
    stop = greedy(model, prompts[:1], 3)[2]
    steps: list[list[int | None]] = []
    out = model.generate(prompts, max_new_tokens=9, stop_ids=(stop,), stream=steps.append)
    assert "stop" in out.reasons and "length" in out.reasons
    assert len(steps) == 9 and all(len(step) == 3 for step in steps)
    for s, ids in enumerate(out.sequences):
        assert [step[s] for step in steps] == ids + [None] * (9 - len(ids))


def test_generation_stops_when_every_sequence_has(model):
    prompts = random_ids(1, 20)
    ids = greedy(model, prompts, 3)
    steps = []
    out = model.generate(prompts, max_new_tokens=500, stop_ids=ids[2:], stream=steps.append)
    assert out.reasons == ["stop"] and out.sequences == [ids[: len(steps)]] and len(steps) <= 3


def test_no_graph_is_kept(model):
    assert all(p.requires_grad for p in model.parameters())
    seen = []

    class Watch:
        def __call__(self, name, tensor):
            seen.append(tensor.requires_grad)
            return tensor

        def scope(self, prefix):
            return self

    model.tap = Watch()
    try:
        model.generate(random_ids(1, 3), max_new_tokens=2)
    finally:
        model.tap = None
    assert seen and not any(seen)


# ---- the distribution

LOGITS = torch.tensor([1.0, -0.5, 2.0, 0.3, -30.0, 1.9, -2.0, 0.0])
DRAWS = 40_000


def frequencies(**settings) -> Tensor:
    """Share of each of 8 tokens in `DRAWS` draws from `LOGITS`."""
    generator = torch.Generator().manual_seed(11)
    drawn = sample(LOGITS.expand(DRAWS, -1), generator=generator, **settings)
    assert drawn.shape == (DRAWS,) and drawn.dtype == torch.int64
    return torch.bincount(drawn, minlength=8).double()


def expected_shares(temperature: float, top_p: float) -> list[float]:
    """By the definition, in plain Python: the smallest set of likeliest tokens that reaches `top_p`."""
    weights = [math.exp(x / temperature) for x in LOGITS.double().tolist()]
    shares = [w / sum(weights) for w in weights]
    kept, reached = set(), 0.0
    for token in sorted(range(8), key=lambda t: -shares[t]):
        if reached >= top_p:
            break
        kept.add(token)
        reached += shares[token]
    return [share / reached if token in kept else 0.0 for token, share in enumerate(shares)]


def chi_square(counts: Tensor, shares: list[float]) -> float:
    """Sum of (found - expected)^2 / expected; tokens expected fewer than 10 times count as one."""
    found, expected, rare = [], [], [0.0, 0.0]
    for count, share in zip(counts.tolist(), shares, strict=True):
        if share * DRAWS < 10:
            rare = [rare[0] + count, rare[1] + share * DRAWS]
        else:
            found.append(count)
            expected.append(share * DRAWS)
    assert rare[0] <= rare[1] + 6 * math.sqrt(rare[1])  # and none where none is expected
    return sum((f - e) ** 2 / e for f, e in zip(found, expected, strict=True))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_p", [0.2, 0.6, 0.9, 1.0])
def test_draws_have_the_promised_distribution(temperature, top_p):
    counts = frequencies(temperature=temperature, top_p=top_p)
    shares = expected_shares(temperature, top_p)
    assert all(count == 0 for count, share in zip(counts.tolist(), shares, strict=True) if share == 0.0)
    # With at most 7 degrees of freedom it is above 30 once in 10,000 seeds, and this seed is fixed.
    assert chi_square(counts, shares) < 30.0
    if top_p == 1.0:  # draws enough to tell a temperature that is a tenth higher
        assert chi_square(counts, expected_shares(temperature * 1.1, top_p)) > 60.0


def test_top_p_cuts_exactly_where_its_share_is_reached():
    shares = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625])  # sums that floating point holds exactly
    logits = shares.log().expand(2000, -1)

    def support(top_p: float) -> set[int]:
        drawn = sample(logits, temperature=1.0, top_p=top_p, generator=torch.Generator().manual_seed(0))
        return set(drawn.tolist())

    assert support(1e-9) == support(0.49) == {0}
    assert support(0.51) == support(0.74) == {0, 1}
    assert support(0.76) == {0, 1, 2}
    assert support(0.88) == {0, 1, 2, 3}  # of two equal tokens the lower id
    assert support(1.0) == {0, 1, 2, 3, 4}
    permuted = torch.tensor([3, 0, 4, 1, 2])  # ids in another order than likelihoods
    drawn = sample(
        logits[:, permuted], temperature=1.0, top_p=0.6, generator=torch.Generator().manual_seed(0)
    )
    assert set(drawn.tolist()) == {1, 3}


def test_temperature_zero_is_the_largest_logit_and_the_lowest_id_among_equals():
    logits = torch.zeros(64, 500)
    generator = torch.Generator().manual_seed(3)
    first = torch.randint(0, 400, (64,), generator=generator)
    for row, start in enumerate(first.tolist()):
        logits[row, start :: 1 + row % 7] = 5.0
    assert torch.equal(sample(logits, temperature=0.0, top_p=1.0, generator=None), first)
    narrow = sample(logits.bfloat16(), temperature=0.0, top_p=0.5, generator=None)
    assert torch.equal(narrow, first)


def test_a_low_temperature_does_not_overflow():
    logits = torch.tensor([[3.0e4, 2.9e4, -3.0e4]])
    assert sample(
        logits, temperature=1e-6, top_p=1.0, generator=torch.Generator().manual_seed(0)
    ).tolist() == [0]
    assert sample(logits.half(), temperature=1e-3, top_p=0.9, generator=None).tolist() == [0]


def test_the_seed_fixes_the_draws(model):
    prompts = random_ids(2, 10)
    settings = {"max_new_tokens": 12, "temperature": 1.0, "top_p": 0.95}
    torch.manual_seed(1)
    first = model.generate(prompts, seed=5, **settings).sequences
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert model.generate(prompts, seed=5, **settings).sequences == first
    assert model.generate(prompts, seed=6, **settings).sequences != first
    assert torch.equal(torch.get_rng_state(), state)  # nothing is drawn from the global generator
    unseeded = model.generate(prompts, **settings).sequences
    assert model.generate(prompts, **settings).sequences != unseeded
    torch.manual_seed(2)
    assert model.generate(prompts, **settings).sequences == unseeded


def test_sampled_text_is_drawn_from_the_model_at_every_step(model):
    """With top_p so low that one token is left, sampling walks the greedy chain whatever the temperature."""
    prompt = random_ids(1, 20)
    out = model.generate(prompt, max_new_tokens=6, temperature=5.0, top_p=1e-6, seed=0)
    assert out.sequences == [greedy(model, prompt, 6)]


# ---- faults and bad settings


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_a_fault(temperature, value):
    logits = torch.zeros(3, 8)
    logits[1, 2:4] = value
    with pytest.raises(NonFiniteError) as caught:
        sample(logits, temperature=temperature, top_p=1.0, generator=None)
    message = caught.value.args[0]
    assert "logits of sequence 1: expected finite values, found 25.0% NaN or Inf" in message
    assert "workbench trace" in message and "\n" not in message


def test_a_damaged_model_does_not_generate():
    model = build()
    with torch.no_grad():
        model.layers[2].mlp.shared_expert.down_proj.weight[0, 0] = math.nan
    with pytest.raises(NonFiniteError, match=r"sequence 0: expected finite values, found 100\.0%"):
        model.generate(random_ids(2, 5), max_new_tokens=3)


def test_the_limit_of_positions_is_kept():
    model, prompt = build(max_position_embeddings=24), random_ids(1, 20)
    assert len(model.generate(prompt, max_new_tokens=4).sequences[0]) == 4
    with pytest.raises(InputError) as caught:
        model.generate(prompt, max_new_tokens=5)
    message = caught.value.args[0]
    assert message.startswith("prompt of 20 tokens and 5 new ones: expected at most")
    assert "max_position_embeddings = 24, found 25" in message and "\n" not in message


BAD_SETTINGS = {
    "no new tokens": ({"max_new_tokens": 0}, "max_new_tokens: expected a whole number of at least 1, found 0"),
    "negative count": ({"max_new_tokens": -3}, "max_new_tokens: expected a whole number of at least 1, found -3"),
    "half a token": ({"max_new_tokens": 2.5}, "max_new_tokens: expected a whole number of at least 1, found 2.5"),
    "one stop id": ({"stop_ids": 40}, "stop_ids: expected a collection of token ids, found 40; write [40]"),
    "half a seed": ({"seed": 1.5}, "seed: expected a whole number of 64 bits, found 1.5"),
    "negative temperature": ({"temperature": -0.1}, "temperature: expected a finite number of at least 0"),
    "infinite temperature": ({"temperature": math.inf}, "temperature: expected a finite number"),
    "temperature not a number": ({"temperature": math.nan}, "temperature: expected a finite number"),
    "top_p of zero": ({"top_p": 0.0}, "top_p: expected a number above 0 and at most 1, found 0.0"),
    "top_p above one": ({"top_p": 1.01}, "top_p: expected a number above 0 and at most 1, found 1.01"),
    "top_p not a number": ({"top_p": math.nan}, "top_p: expected a number above 0 and at most 1, found nan"),
    "mask of another shape": ({"attention_mask": torch.ones(1, 4)}, "attention_mask: expected the shape"),
    "mask of padding alone": ({"attention_mask": torch.zeros(1, 5)}, "expected one run of ones"),
}


@pytest.mark.parametrize("case", BAD_SETTINGS)
def test_bad_settings_are_one_line(model, case):
    settings, words = BAD_SETTINGS[case]
    with pytest.raises(InputError) as caught:
        model.generate(random_ids(1, 5), **{"max_new_tokens": 2} | settings)
    assert words in caught.value.args[0] and "\n" not in caught.value.args[0]


@pytest.mark.parametrize("ids", [random_ids(1, 0), random_ids(1, 5)[0], random_ids(1, 5) + 97])
def test_bad_prompts_are_one_line(model, ids):
    with pytest.raises(InputError, match="input_ids: expected"):
        model.generate(ids, max_new_tokens=2)
