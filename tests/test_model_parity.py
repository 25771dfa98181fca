"""Logits against transformers: the same checkpoint on disk, read by both, teacher-forced, fp32 on the CPU.

transformers' single prefill is the arbiter of everything: of our prefill, of a prefill in two parts, of
decoding token by token. The measure is max |difference| / max |logit|. Where the two send a token to other
experts because the probabilities at the cut are closer than `TIE_MARGIN`, both are right, and their logits
differ by what the experts do: that token and those after it are printed, counted and left out.
"""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models import mini, mini256, mini_dense, mini_next
from torch import Tensor

import workbench
from workbench.checkpoint import write_checkpoint
from workbench.config import ModelConfig
from workbench.kernels import Kernels
from workbench.kernels.agreement import logit_difference
from workbench.model import CausalLM
from workbench.tokenizer import Tokenizer
from workbench.training.corpus import read_documents
from workbench.training.train import MINIATURE

DATA = Path(__file__).parent.parent / "data"
PEER_CLASSES = {
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
    "qwen3_5": "Qwen3_5ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
}
SHAPES: dict[str, Callable[[], ModelConfig]] = {
    "mini": lambda: ModelConfig.from_hf(mini()),
    "mini256": lambda: ModelConfig.from_hf(mini256()),
    "dense": lambda: ModelConfig.from_hf(mini_dense()),
    "next": lambda: ModelConfig.from_hf(mini_next()),
    "miniature": lambda: MINIATURE,
}
#: Shapes in which what the five above have in common is different.
ODD_SHAPES: dict[str, dict[str, Any]] = {
    "next, weights not renormalised": mini_next(norm_topk_prob=False, num_experts_per_tok=3),
    "tied head, one value head per key head": mini(tie_word_embeddings=True, linear_num_value_heads=2),
    "dense, three value heads per key head, four queries per key": mini_dense(
        linear_num_value_heads=6, num_key_value_heads=1, rms_norm_eps=1e-3
    ),
    "half of each head rotated, slowly": mini(
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 100.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [4, 2, 2],
        }
    ),
    "full attention first, window of two": mini_next(
        linear_conv_kernel_dim=2,
        mlp_only_layers=[],
        full_attention_interval=None,
        layer_types=["full_attention", "linear_attention", "linear_attention", "full_attention"],
    ),
}

LIMIT = 1e-5
PREFILLS = (1, 63, 64, 65, 200)
PROMPT = 130
LONG_PROMPT = 600
SPLITS = (1, 63, 64, 65, 129)
#: Difference of two router probabilities that fp32 arithmetic may order either way.
TIE_MARGIN = 1e-5


class RecordingKernels(Kernels):
    """The automatic choice of backends, and every router's experts."""

    def __init__(self) -> None:
        super().__init__()
        self.chosen: list[Tensor] = []

    def routing(self, logits: Tensor, **settings: Any) -> tuple[Tensor, Tensor]:
        weights, experts = super().routing(logits, **settings)
        self.chosen.append(experts)
        return weights, experts


@dataclass(frozen=True)
class Run:
    """Logits [B, T, vocabulary], and for each sparse layer the experts [B, T, A] and the margins [B, T].

    A margin is the gap between the probabilities of the last chosen expert and the first that was not.
    """

    logits: Tensor
    experts: list[Tensor]
    margins: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Flip:
    """A token that two runs route to different experts, with no earlier flip that could have caused it."""

    layer: int
    row: int
    token: int
    margin: float


class Pair:
    """Our model and transformers' of one checkpoint directory, and the runs of the latter by prompt."""

    def __init__(self, name: str, path: Path):
        self.name = name
        self.model = workbench.load(path, dtype="float32")
        self.model.kernels = RecordingKernels()
        self.sparse_layers = [i for i, kind in enumerate(self.model.config.mlp_types) if kind == "sparse"]
        peer_class = getattr(transformers, PEER_CLASSES[self.model.config.family])
        self.peer = peer_class.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
        self._routed: list[tuple[Tensor, Tensor]] = []
        for module in self.peer.modules():
            if type(module).__name__.endswith("TopKRouter"):
                module.register_forward_hook(lambda _, __, out: self._routed.append((out[0], out[2])))
        self._references: dict[tuple, Run] = {}

    def prompt(self, tokens: int, rows: int = 2) -> Tensor:
        """Random ids, [rows, tokens]; a shorter prompt is the beginning of a longer one."""
        generator = torch.Generator().manual_seed(7)
        return torch.randint(0, self.model.config.vocab_size, (rows, 640), generator=generator)[:, :tokens]

    def ours(self, ids: Tensor, *sizes: int) -> Run:
        """Logits of `ids` read in parts of the given sizes, one after the other into one cache."""
        self.model.kernels.chosen.clear()
        cache, logits = None, []
        for part in ids.split(sizes, dim=1) if sizes else [ids]:
            out = self.model(part, cache=cache)
            cache = out.cache
            logits.append(out.logits)
        experts = self._by_layer(self.model.kernels.chosen, ids.shape[0])
        return Run(torch.cat(logits, dim=1), experts)

    def theirs(self, ids: Tensor, *sizes: int) -> Run:
        """The same of transformers; one prefill where no sizes are given."""
        self._routed.clear()
        cache, logits = None, []
        for part in ids.split(sizes, dim=1) if sizes else [ids]:
            out = self.peer(part, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            logits.append(out.logits)
        experts = self._by_layer([experts for _, experts in self._routed], ids.shape[0])
        gaps = self._by_layer([self._margin(router) for router, _ in self._routed], ids.shape[0])
        return Run(torch.cat(logits, dim=1), experts, [gap.squeeze(-1) for gap in gaps])

    def comparison(self) -> "Comparison":
        return Comparison(self.name, self.sparse_layers)

    def arbiter(self, ids: Tensor) -> Run:
        """transformers' single prefill of `ids`."""
        key = tuple(ids.shape), ids.numpy().tobytes()
        if key not in self._references:
            self._references[key] = self.theirs(ids)
        return self._references[key]

    def _margin(self, router_logits: Tensor) -> Tensor:
        """[rows, E] -> [rows, 1], see `Run`."""
        top_k = self.model.config.num_experts_per_tok
        best = router_logits.softmax(-1, dtype=torch.float32).topk(top_k + 1).values
        return best[:, -2:-1] - best[:, -1:]

    def _by_layer(self, calls: list[Tensor], batch: int) -> list[Tensor]:
        """What the routers returned call by call, [B * t, A] each -> one [B, T, A] per sparse layer."""
        count = len(self.sparse_layers)
        assert len(calls) == 0 if count == 0 else len(calls) % count == 0
        layers = [calls[i::count] for i in range(count)]
        return [torch.cat([x.unflatten(0, (batch, -1)) for x in layer], dim=1) for layer in layers]


def root_flips(run: Run, reference: Run, layers: list[int]) -> list[Flip]:
    """Flips that no other one of the row explains: none in a layer up to theirs at a token up to theirs."""
    roots: list[Flip] = []
    pairs = zip(run.experts, reference.experts, strict=True)
    for layer, (ours, theirs), margins in zip(layers, pairs, reference.margins, strict=True):
        differs = (ours.sort(-1).values != theirs.sort(-1).values).any(-1)
        for row, token in differs.nonzero().tolist():
            if not any(flip.row == row and flip.token <= token for flip in roots):
                roots.append(Flip(layer, row, token, margins[row, token].item()))
    return roots


def compared(run: Run, reference: Run, flips: list[Flip]) -> tuple[float, int]:
    """(difference over the tokens before any flip of their row, number of tokens left out)."""
    kept = torch.ones(run.logits.shape[:2], dtype=torch.bool)
    for flip in flips:
        kept[flip.row, flip.token :] = False
    difference = logit_difference(run.logits[kept], reference.logits[kept]) if kept.any() else 0.0
    return difference, int((~kept).sum())


class Comparison:
    """Differences of several runs from the arbiter, printed one per line and judged together."""

    def __init__(self, name: str, sparse_layers: list[int]):
        self.name, self.sparse_layers = name, sparse_layers
        self.worst, self.tokens, self.excluded = 0.0, 0, 0
        self.flips: list[Flip] = []

    def add(self, label: str, run: Run, reference: Run) -> None:
        assert run.logits.shape == reference.logits.shape and len(run.experts) == len(reference.experts)
        flips = root_flips(run, reference, self.sparse_layers)
        difference, excluded = compared(run, reference, flips)
        print(f"  {self.name}, {label}: {difference:.2e}, {excluded} tokens left out")
        for flip in flips:
            print(f"    other experts, at a margin of {flip.margin:.1e}: {flip}")
        self.worst = max(self.worst, difference)
        self.tokens += run.logits.shape[0] * run.logits.shape[1]
        self.excluded += excluded
        self.flips += flips

    def check(self, limit: float) -> None:
        assert all(flip.margin < TIE_MARGIN for flip in self.flips), self.flips
        # A tie of one token returns with every way in which the prompt is read.
        ties = {(flip.layer, flip.row, flip.token) for flip in self.flips}
        assert len(ties) <= 2 and 2 * self.excluded <= self.tokens, self.flips
        assert self.worst <= limit


def write_random(path: Path, config: ModelConfig, start: str) -> None:
    """`start` is a decay of `init_weights`, or `scattered`: branches count for more, norms are drawn."""
    if start == "scattered":
        config = dataclasses.replace(config, initializer_range=0.04)
    model = CausalLM(config).init_weights(5, "realistic" if start == "scattered" else start)
    if start == "scattered":
        generator = torch.Generator().manual_seed(6)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    write_checkpoint(path, config, model.state_dict(), dtype=torch.float32)


@pytest.fixture(scope="module", params=["class_default", "realistic", "scattered"])
def start(request) -> str:
    return request.param


@pytest.fixture(scope="module", params=SHAPES)
def pair(request, start, tmp_path_factory) -> Pair:
    path = tmp_path_factory.mktemp("parity") / "checkpoint"
    write_random(path, SHAPES[request.param](), start)
    return Pair(f"{request.param} {start}", path)


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def test_prefill(pair):
    comparison = pair.comparison()
    for tokens in PREFILLS:
        ids = pair.prompt(tokens)
        comparison.add(f"prefill of {tokens}", pair.ours(ids), pair.arbiter(ids))
    comparison.check(LIMIT)


def test_prefill_in_two_parts(pair):
    comparison, ids = pair.comparison(), pair.prompt(PROMPT)
    for split in SPLITS:
        sizes = split, PROMPT - split
        comparison.add(f"prefill of {sizes}", pair.ours(ids, *sizes), pair.arbiter(ids))
    comparison.check(LIMIT)


def test_decoding_token_by_token(pair):
    comparison, ids = pair.comparison(), pair.prompt(PROMPT)
    comparison.add(f"{PROMPT} single tokens", pair.ours(ids, *[1] * PROMPT), pair.arbiter(ids))
    comparison.check(LIMIT)


@pytest.mark.parametrize("shape", SHAPES)
def test_long_prompts(shape, tmp_path):
    """Some backends serve long calls only."""
    write_random(tmp_path / "c", SHAPES[shape](), "scattered")
    pair = Pair(shape, tmp_path / "c")
    comparison, ids = pair.comparison(), pair.prompt(LONG_PROMPT)
    for sizes in ((LONG_PROMPT,), (65, LONG_PROMPT - 65), (LONG_PROMPT - 1, 1)):
        comparison.add(f"parts of {sizes}", pair.ours(ids, *sizes), pair.arbiter(ids))
    comparison.check(LIMIT)


@pytest.mark.parametrize("shape", ODD_SHAPES)
def test_odd_shapes(shape, tmp_path):
    write_random(tmp_path / "c", ModelConfig.from_hf(ODD_SHAPES[shape]), "scattered")
    pair = Pair(shape, tmp_path / "c")
    comparison, ids = pair.comparison(), pair.prompt(PROMPT)
    for sizes in ((PROMPT,), (65, 65), (64, *[1] * 8, 58)):
        comparison.add(f"parts of {sizes}", pair.ours(ids, *sizes), pair.arbiter(ids))
    comparison.check(LIMIT)


# ---- the trained miniature


@pytest.fixture(scope="module")
def trained() -> Pair:
    return Pair("trained", DATA / "miniature")


@pytest.fixture(scope="module")
def texts() -> Tensor:
    """The first 200 tokens of held-out documents of different sources, [4, 200]."""
    tokenizer = Tokenizer.from_directory(DATA / "miniature")
    rows: dict[str, list[int]] = {}
    for document in read_documents(DATA / "heldout.jsonl"):
        ids = tokenizer.encode(document.text)
        if len(ids) >= max(PREFILLS):
            rows.setdefault(document.source, ids[: max(PREFILLS)])
    assert len(rows) >= 4
    return torch.tensor(list(rows.values())[:4])


@pytest.fixture(scope="module")
def trained_limit(trained, texts) -> float:
    """The larger of 2e-5 and 1.5 times the gap between transformers' own prefill and its decoding."""
    ids = texts[:, :PROMPT]
    with torch.inference_mode():
        prefill, decode = trained.arbiter(ids), trained.theirs(ids, *[1] * PROMPT)
    flips = root_flips(decode, prefill, trained.sparse_layers)
    gap, excluded = compared(decode, prefill, flips)
    limit = max(2e-5, 1.5 * gap)
    print(f"\n  transformers' prefill against its decoding: {gap:.2e}, {excluded} tokens left out")
    print(f"  limit of the trained miniature: {limit:.2e}")
    return limit


def test_trained_prefill(trained, trained_limit, texts):
    comparison = trained.comparison()
    for tokens in PREFILLS:
        ids = texts[:, :tokens]
        comparison.add(f"prefill of {tokens}", trained.ours(ids), trained.arbiter(ids))
    comparison.check(trained_limit)


def test_trained_prefill_in_two_parts(trained, trained_limit, texts):
    comparison, ids = trained.comparison(), texts[:, :PROMPT]
    for split in SPLITS:
        sizes = split, PROMPT - split
        comparison.add(f"prefill of {sizes}", trained.ours(ids, *sizes), trained.arbiter(ids))
    comparison.check(trained_limit)


def test_trained_decoding_token_by_token(trained, trained_limit, texts):
    comparison, ids = trained.comparison(), texts[:, :PROMPT]
    comparison.add(f"{PROMPT} single tokens", trained.ours(ids, *[1] * PROMPT), trained.arbiter(ids))
    comparison.check(trained_limit)


# ---- the comparison itself


def a_run(experts: list[list[int]], margins: list[float]) -> Run:
    """One row, one sparse layer, one logit per token that counts up."""
    tokens = len(experts)
    logits = torch.arange(1.0, tokens + 1)[None, :, None]
    return Run(logits, [torch.tensor([experts])], [torch.tensor([margins])])


def test_a_flip_excludes_its_token_and_those_after_it_only():
    reference = a_run([[0, 1], [2, 3], [0, 3], [1, 2]], [0.1, 0.2, 1e-7, 0.3])
    # The order of experts does not matter, and the last flip follows from the one before.
    run = a_run([[1, 0], [2, 3], [0, 2], [2, 3]], [0.0] * 4)
    run.logits[0, 1] += 0.4
    run.logits[0, 2:] += 100.0
    flips = root_flips(run, reference, [5])
    assert flips == [Flip(5, 0, 2, pytest.approx(1e-7))]
    assert compared(run, reference, flips) == (pytest.approx(0.4 / 2), 2)
    assert compared(run, reference, [])[0] == pytest.approx(100.0 / 4)


def test_a_difference_and_a_flip_with_a_margin_are_failures():
    experts, margins = [[0, 1], [2, 3], [0, 3]], [0.1, 0.2, 1e-7]
    reference = a_run(experts, margins)
    for label, other, right in (
        ("the same", a_run(experts, margins), True),
        ("a logit moved by more than the limit", Run(reference.logits + 4e-5, reference.experts), False),
        ("a logit that is not a number", Run(reference.logits * torch.nan, reference.experts), False),
        ("a tie ordered the other way", a_run([[0, 1], [2, 3], [0, 2]], margins), True),
        ("other experts", a_run([[0, 1], [1, 3], [0, 3]], margins), False),
    ):
        comparison = Comparison("made up", [5])
        comparison.add(label, other, reference)
        if right:
            comparison.check(LIMIT)
        else:
            with pytest.raises(AssertionError):
                comparison.check(LIMIT)
