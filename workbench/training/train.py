"""Train a miniature on token files, with progress, resume and a curve.

    python -m workbench.training.train --tokens DIR --out DIR [--tokenizer DIR] [--device cuda] [--resume]

`--tokens` holds the files of `workbench.training.tokenize`, all little-endian without a header:

    train.u16, heldout.u16            running text, one stream of token ids each
    {train,validation}_dialogues.u16  rendered dialogues one after another, each followed by one <|endoftext|>
    {train,validation}_dialogues.u8   per token 1 where it is part of the assistant's turn to learn, else 0
    {train,validation}_dialogues.starts.u32   index of the first token of each dialogue

and with `--dialogue-rows 0` the first two alone. `--out` receives

    curve.csv          step, tokens seen, losses, held-out and validation figures, seconds
    state.safetensors  weights, optimizer moments and the best weights so far; state.json beside it is written last
    checkpoint/        model.safetensors (bf16) and config.json of the best weights, training.json with figures and
                       the files of `--tokenizer` that make it complete: tokenizer, chat template, generation_config

A step reads `batch` rows of length + 2 tokens: `dialogue_rows` of them begin where a dialogue begins, the others are
random windows of text. Loss: cross-entropy of the next token, the mean over text rows + dialogue_weight * the weighted
mean over dialogue rows (tokens to learn weigh 1, all others context_weight), + mtp_weight * the same of the token after
next + router_aux_loss_coef * load balance, E sum_e f_e P_e with f_e the share of token-expert pairs times A and P_e the
mean probability, pooled over all sparse layers (A when balanced). AdamW, linear warm-up, cosine to final_rate times the
peak, gradients clipped to norm 1. The draws of data depend on seed and step alone, so a resumed run sees what an
uninterrupted one would have. The best weights have the lowest sum of held-out loss and share of validation dialogues
that are not exact: one percent of perplexity weighs as much as one dialogue in a hundred.

On a CUDA device a whole step is one CUDA graph: a model this small otherwise waits for its kernels to be launched.
`--eager` runs the same step kernel by kernel, as a CPU always does.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import io
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from workbench import __version__
from workbench.analysis.language import unigram_perplexity
from workbench.checkpoint import read_checkpoint, write_checkpoint
from workbench.config import ModelConfig
from workbench.errors import InputError
from workbench.kernels import Kernels
from workbench.loading import device_named
from workbench.model import CausalLM, SparseBlock
from workbench.quality import draft_acceptance, perplexity
from workbench.training.command import one_line_errors
from workbench.training.corpus import write_atomic

#: Two groups of three linear and one full layer, in shapes that serving engines take: heads of 64, sizes in 64s.
MINIATURE = ModelConfig(
    family="qwen3_5_moe",
    vocab_size=4096,
    hidden_size=128,
    num_hidden_layers=8,
    max_position_embeddings=8192,
    rms_norm_eps=1e-6,
    hidden_act="silu",
    tie_word_embeddings=True,
    layer_types=(("linear_attention",) * 3 + ("full_attention",)) * 2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    rope_theta=1e7,
    partial_rotary_factor=0.25,
    mrope_section=(4, 2, 2),
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=64,
    linear_value_head_dim=64,
    linear_conv_kernel_dim=4,
    mlp_types=("sparse",) * 8,
    num_experts=16,
    num_experts_per_tok=4,
    moe_intermediate_size=64,
    shared_expert_intermediate_size=64,
    norm_topk_prob=True,
    mtp_num_hidden_layers=1,
    eos_token_id=(4064,),
    dtype="bfloat16",
    router_aux_loss_coef=0.01,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What a run depends on besides data and configuration; a resumed run must have the same."""

    steps: int = 6000
    batch: int = 16
    length: int = 2048
    dialogue_rows: int = 8
    dialogue_weight: float = 1.0
    context_weight: float = 0.1
    validation_dialogues: int = 240
    learning_rate: float = 3e-3
    warmup: int = 100
    final_rate: float = 0.1
    weight_decay: float = 0.1
    mtp_weight: float = 0.3
    seed: int = 1

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "length", "validation_dialogues"):
            if getattr(self, name) < 1:
                raise InputError(f"setting {name}: expected at least 1, found {getattr(self, name)}")
        if not 0 <= self.dialogue_rows < self.batch:
            raise InputError(
                f"setting dialogue_rows: expected 0 to {self.batch - 1}, so that a row of text remains in the batch of "
                f"{self.batch}, found {self.dialogue_rows}"
            )
        for name in ("dialogue_weight", "context_weight", "mtp_weight", "final_rate"):
            if getattr(self, name) < 0:
                raise InputError(f"setting {name}: expected 0 or more, found {getattr(self, name)}")

    @property
    def text_rows(self) -> int:
        return self.batch - self.dialogue_rows


def learning_rate(step: int, settings: Settings) -> float:
    """Linear from zero over `warmup` steps, then half a cosine down to `final_rate` times the peak."""
    if step < settings.warmup:
        return settings.learning_rate * (step + 1) / settings.warmup
    progress = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
    return settings.learning_rate * (
        settings.final_rate + (1.0 - settings.final_rate) * 0.5 * (1.0 + math.cos(math.pi * progress))
    )


def read_array(path: Path, dtype: str) -> np.ndarray:
    """A headerless file of numbers, memory-mapped and read-only. Raises InputError where it is missing or empty."""
    try:
        return np.memmap(path, dtype=dtype, mode="r")
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path}: expected a file of {np.dtype(dtype).name} numbers, found none ({error}); "
            "write it with `python -m workbench.training.tokenize`"
        ) from None


def require_text(tokens: np.ndarray, length: int, path: Path) -> np.ndarray:
    """`tokens`. Raises InputError where they are too few to draw windows of length + 2 from."""
    if len(tokens) < length + 3:
        raise InputError(f"{path}: expected at least {length + 3} tokens for rows of {length}, found {len(tokens)}")
    return tokens


@dataclass(frozen=True, slots=True)
class DialogueStream:
    """A stream of dialogues: `tokens` [N] uint16, `learned` [N] uint8 (1 = to learn), `starts` [dialogues] int64."""

    tokens: np.ndarray
    learned: np.ndarray
    starts: np.ndarray

    @classmethod
    def read(cls, folder: Path, name: str) -> DialogueStream:
        """Read `name`.u16, .u8 and .starts.u32 of `folder`. Raises InputError where they do not fit each other."""
        tokens, learned = read_array(folder / f"{name}.u16", "<u2"), read_array(folder / f"{name}.u8", "u1")
        starts = read_array(folder / f"{name}.starts.u32", "<u4").astype(np.int64)
        if len(learned) != len(tokens):
            raise InputError(f"{folder / name}.u8: expected one byte per token, {len(tokens)}, found {len(learned)}")
        if starts[0] != 0 or starts[-1] >= len(tokens) or (np.diff(starts) < 1).any():
            raise InputError(
                f"{folder / name}.starts.u32: expected rising indices from 0 to below {len(tokens)}, "
                f"found {starts[0]} to {starts[-1]}"
            )
        if learned.max() > 1:
            raise InputError(f"{folder / name}.u8: expected 0 and 1, found {learned.max()}")
        count = np.add.reduceat(learned, starts, dtype=np.int64)
        if not count.all():
            raise InputError(
                f"{folder / name}.u8: dialogue {int(count.argmin())}: expected tokens to learn, found none"
            )
        return cls(tokens, learned, starts)

    def beginnings(self, length: int) -> np.ndarray:
        """The starts from which a whole row of length + 2 tokens can be read.

        Raises InputError where there is none, and where such a row holds nothing to learn.
        """
        fitting = self.starts[self.starts + length + 2 <= len(self.tokens)]
        if not len(fitting):
            raise InputError(
                f"dialogues: expected at least {length + 2} tokens for one row of {length}, found {len(self.tokens)}"
            )
        before = np.append(0, np.cumsum(self.learned, dtype=np.int64))  # [N + 1], tokens to learn before each
        count = before[fitting + length + 1] - before[fitting + 2]  # what both heads predict
        if not count.all():
            raise InputError(
                f"dialogue {int(count.argmin())}: expected tokens to learn among the first {length + 1}, found none; "
                "raise --length"
            )
        return fitting


@dataclass(frozen=True, slots=True)
class Batch:
    """`tokens` [batch, length + 2] int64, text rows first; `learned` [dialogue rows, length + 2] bool of the others."""

    tokens: Tensor
    learned: Tensor

    def to(self, device: torch.device) -> Batch:
        return Batch(self.tokens.to(device), self.learned.to(device))


def draw_batch(
    text: np.ndarray, dialogues: DialogueStream | None, beginnings: np.ndarray, step: int, settings: Settings
) -> Batch:
    """Random windows of `text` and rows from random `beginnings` of dialogues, the same for the same seed and step."""
    draws = np.random.default_rng((settings.seed, step))
    width = settings.length + 2
    starts = draws.integers(0, len(text) - width, size=settings.text_rows)
    rows = [text[s : s + width] for s in starts]
    learned = np.zeros((0, width), dtype=bool)
    if dialogues is not None and settings.dialogue_rows:
        starts = draws.choice(beginnings, size=settings.dialogue_rows)
        rows += [dialogues.tokens[s : s + width] for s in starts]
        learned = np.stack([dialogues.learned[s : s + width] for s in starts]).astype(bool)
    return Batch(torch.from_numpy(np.stack(rows).astype(np.int64)), torch.from_numpy(learned))


@contextmanager
def router_logits(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collect what every router of the model computes inside the block, [rows, E] each."""
    collected: list[Tensor] = []
    handles = [
        block.gate.register_forward_hook(lambda module, args, out: collected.append(out))
        for block in model.modules()
        if isinstance(block, SparseBlock)
    ]
    try:
        yield collected
    finally:
        for handle in handles:
            handle.remove()


def load_balance(logits: list[Tensor], top_k: int) -> Tensor:
    """E sum_e f_e P_e pooled over layers; `top_k` when every expert gets the same load."""
    pooled = torch.cat(logits).float()
    probabilities = pooled.softmax(-1)
    chosen = probabilities.topk(top_k, dim=-1).indices
    load = torch.zeros_like(probabilities).scatter(1, chosen, 1.0).mean(0)
    return pooled.shape[-1] * (load * probabilities.mean(0)).sum()


def cross_entropies(
    logits: Tensor, targets: Tensor, learned: Tensor, context_weight: float
) -> tuple[Tensor, Tensor | None]:
    """Mean cross-entropy of the text rows, and the weighted mean of the dialogue rows (None without any).

    logits [B, T, vocabulary], targets [B, T], learned [dialogue rows, T] of the targets of the last rows.
    """
    rows = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    count = learned.shape[0]
    if not count:
        return rows.mean(), None
    text, dialogues = rows.split([rows.shape[0] - count, count])
    weights = learned.to(rows.dtype) * (1.0 - context_weight) + context_weight
    return text.mean(), (weights * dialogues).sum() / weights.sum()


def losses(model: CausalLM, batch: Batch, settings: Settings) -> dict[str, Tensor]:
    """Terms of the loss and their weighted `total`.

    `next`, `draft`: text rows, next token and token after next; `dialogue_next`, `dialogue_draft`: dialogue rows (only
    where there are some); `balance`: load balance. No term is read on the host: a CUDA graph can hold all of this.
    """
    inputs, following, after_next = batch.tokens[:, :-2], batch.tokens[:, 1:-1], batch.tokens[:, 2:]
    with router_logits(model) as routed:
        out = model(inputs, use_cache=False)
        drafts = model.mtp_logits(out.hidden, following)
    weight = settings.context_weight
    text_next, dialogue_next = cross_entropies(out.logits, following, batch.learned[:, 1:-1], weight)
    text_draft, dialogue_draft = cross_entropies(drafts, after_next, batch.learned[:, 2:], weight)
    balance = load_balance(routed, model.config.num_experts_per_tok)
    terms = {"next": text_next, "draft": text_draft, "balance": balance}
    total = text_next + settings.mtp_weight * text_draft + model.config.router_aux_loss_coef * balance
    if dialogue_next is not None and dialogue_draft is not None:
        terms |= {"dialogue_next": dialogue_next, "dialogue_draft": dialogue_draft}
        total = total + settings.dialogue_weight * (dialogue_next + settings.mtp_weight * dialogue_draft)
    return terms | {"total": total}


@dataclass(frozen=True, slots=True)
class DialogueFit:
    """`loss`: mean cross-entropy of the tokens to learn; `exact`: share of dialogues all of whose are the argmax."""

    loss: float
    exact: float


def padded_dialogues(dialogues: DialogueStream, count: int, batch: int = 16) -> list[Batch]:
    """The first `count` dialogues in batches of similar length, padded with zeros on the right.

    Nothing that follows a token changes its logits, so that padding needs no mask.
    """
    ends = np.append(dialogues.starts[1:], len(dialogues.tokens))
    spans = sorted(zip(dialogues.starts[:count], ends[:count], strict=True), key=lambda span: span[1] - span[0])
    batches = []
    for first in range(0, len(spans), batch):
        part = spans[first : first + batch]
        width = max(end - start for start, end in part)
        tokens, learned = np.zeros((len(part), width), dtype=np.int64), np.zeros((len(part), width), dtype=bool)
        for row, (start, end) in enumerate(part):
            tokens[row, : end - start] = dialogues.tokens[start:end]
            learned[row, : end - start] = dialogues.learned[start:end]
        batches.append(Batch(torch.from_numpy(tokens), torch.from_numpy(learned)))
    return batches


@torch.inference_mode()
def dialogue_fit(model: CausalLM, batches: list[Batch]) -> DialogueFit:
    """Teacher-forced figures of the dialogues of `padded_dialogues`."""
    loss, predicted, exact, rows = 0.0, 0, 0, 0
    for batch in batches:
        here = batch.to(model.device)
        targets, learned = here.tokens[:, 1:], here.learned[:, 1:]
        logits = model(here.tokens[:, :-1], use_cache=False).logits
        loss += F.cross_entropy(logits[learned].double(), targets[learned], reduction="sum").item()
        predicted += int(learned.sum())
        exact += int((logits.argmax(-1).eq(targets) | ~learned).all(1).sum())
        rows += targets.shape[0]
    return DialogueFit(loss / predicted, exact / rows)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Matrices decay; norms, gates (A_log, dt_bias) and convolutions do not: it would pull a gate's time constant."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.dim() >= 2 and not name.endswith("conv1d.weight")]
    others = [p for name, p in named if p.dim() < 2 or name.endswith("conv1d.weight")]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


@contextmanager
def preserved(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Undo the steps made inside the block, in weights and optimizer state, each tensor in its place.

    State that the block creates becomes zero, which is what Adam begins with.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    weights = [p.detach().clone() for p in parameters]
    states = [{key: value.clone() for key, value in optimizer.state.get(p, {}).items()} for p in parameters]
    yield
    with torch.no_grad():
        for parameter, weight, before in zip(parameters, weights, states, strict=True):
            parameter.copy_(weight)
            for key, value in optimizer.state[parameter].items():
                if before:
                    value.copy_(before[key])
                else:
                    value.zero_()


class CapturedStep:
    """A training step as one CUDA graph: the kernels of `update`, launched together.

    `update` reads the batch that it is given and nothing else that changes in the host's memory; what it returns are
    tensors that every call overwrites. Warm-up steps, which libraries need before a capture, leave no trace in the
    weights and the optimizer.
    """

    WARM_UP = 3

    def __init__(
        self, update: Callable[[Batch], dict[str, Tensor]], example: Batch, optimizer: torch.optim.Optimizer,
        device: torch.device,
    ):  # fmt: skip
        self.batch = example.to(device)
        with torch.cuda.device(device), preserved(optimizer):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(self.WARM_UP):
                    optimizer.zero_grad(set_to_none=True)
                    update(self.batch)
            torch.cuda.current_stream().wait_stream(side)
        # Gradients come from the graph's own memory, written anew by every replay.
        optimizer.zero_grad(set_to_none=True)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device), torch.cuda.graph(self.graph):
            self.terms = update(self.batch)

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        """Run the step on `batch`. The copy waits for the step before; the step itself is not waited for."""
        self.batch.tokens.copy_(batch.tokens)
        self.batch.learned.copy_(batch.learned)
        self.graph.replay()
        return self.terms


#: What `--tokenizer` must hold for the exported directory to be complete.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def read_tokenizer_files(folder: Path) -> dict[str, bytes]:
    """`TOKENIZER_FILES` of `folder`. Raises InputError where one is missing."""
    try:
        return {name: (folder / name).read_bytes() for name in TOKENIZER_FILES}
    except OSError as error:
        raise InputError(
            f"{error.filename}: expected {', '.join(TOKENIZER_FILES)} in {folder}, found no such file "
            f"({error.strerror}); leave out --tokenizer to write the weights alone"
        ) from None


class Run:
    """A training run and its files; `train` goes from the step reached to the last.

    `eager` runs each step kernel by kernel; otherwise a CUDA device gets one graph per step (a CPU has none).
    `start_from` is a checkpoint directory whose weights stand in the place of random ones.
    """

    def __init__(
        self, tokens: Path, out: Path, settings: Settings, device: str, config: ModelConfig = MINIATURE, *,
        eager: bool = False, start_from: Path | None = None,
    ):  # fmt: skip
        train, heldout = tokens / "train.u16", tokens / "heldout.u16"
        self.train_tokens = require_text(read_array(train, "<u2"), settings.length, train)
        self.heldout_tokens = require_text(read_array(heldout, "<u2"), settings.length, heldout)
        self.dialogues: DialogueStream | None = None
        self.beginnings = np.zeros(0, dtype=np.int64)
        self.validation: list[Batch] = []
        if settings.dialogue_rows:
            self.dialogues = DialogueStream.read(tokens, "train_dialogues")
            self.beginnings = self.dialogues.beginnings(settings.length)
            validation = DialogueStream.read(tokens, "validation_dialogues")
            self.validation = padded_dialogues(validation, settings.validation_dialogues)
        self.out, self.settings, self.config, self.device = out, settings, config, device_named(device)
        self.eager = eager or self.device.type != "cuda"
        out.mkdir(parents=True, exist_ok=True)
        on_cuda = self.device.type == "cuda"
        # Every expert over every token: fixed shapes, no host sync, which is what a small model on a GPU needs. A CPU
        # has neither launches nor syncs to save, and computes the chosen experts alone.
        self.model = CausalLM(config, Kernels("experts=torch_dense" if on_cuda else None))
        self.started_from: dict[str, object] | None = None
        if start_from is None:
            self.model.init_weights(settings.seed, "realistic")
        else:
            self.started_from = self._start_from(start_from)
        self.model.to(self.device)
        self.optimizer = torch.optim.AdamW(
            parameter_groups(self.model, settings.weight_decay), betas=(0.9, 0.95), fused=on_cuda, capturable=on_cuda,
            # A tensor on the device, so that a graph reads the rate of each step instead of the one at its capture.
            lr=torch.tensor(settings.learning_rate, device=self.device) if on_cuda else settings.learning_rate,
        )  # fmt: skip
        self.step = 0
        self.seconds = 0.0
        self.best = (math.inf, 0)  # held-out loss + share of validation dialogues that are not exact, step
        self.best_weights: dict[str, Tensor] = {}
        self.curve: list[dict[str, float]] = []
        self._captured: CapturedStep | None = None
        self._last_report = (0, 0.0)  # step, seconds

    def _start_from(self, folder: Path) -> dict[str, object]:
        """Take the weights of a checkpoint; returns what its training.json says, or where it lies."""
        checkpoint = read_checkpoint(folder, dtype=torch.float32)
        if dataclasses.replace(checkpoint.config, dtype=self.config.dtype) != self.config:
            raise InputError(f"{folder}: expected the configuration of this run, found another; leave out --start-from")
        self.model.load_state_dict(checkpoint.tensors, strict=True)
        figures = folder / "training.json"
        return json.loads(figures.read_text(encoding="utf-8")) if figures.is_file() else {"checkpoint": str(folder)}

    def save(self) -> None:
        tensors = {f"weights.{name}": p.detach() for name, p in self.model.named_parameters()}
        tensors |= {f"best.{name}": p for name, p in self.best_weights.items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer.{key}.{name}"] = value
        temporary = self.out / "state.safetensors.part"
        save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, temporary)
        os.replace(temporary, self.out / "state.safetensors")
        state = {
            "settings": dataclasses.asdict(self.settings), "step": self.step, "seconds": self.seconds,
            "best": self.best, "curve": self.curve, "started_from": self.started_from,
        }  # fmt: skip
        write_atomic(self.out / "state.json", json.dumps(state).encode())
        self._write_curve()

    def resume(self) -> None:
        """Go on from `save`. Raises InputError when there is nothing to resume or the settings differ."""
        path = self.out / "state.json"
        if not path.is_file():
            raise InputError(f"{path}: nothing to resume; start without --resume")
        state = json.loads(path.read_text(encoding="utf-8"))
        if state["settings"] != dataclasses.asdict(self.settings):
            raise InputError(
                f"{path}: was made with other settings {state['settings']}; give the same or another --out"
            )
        self._captured = None  # a graph would go on with the optimizer's tensors of before
        tensors = load_file(self.out / "state.safetensors", device=str(self.device))
        self.step, self.seconds, self.curve = state["step"], state["seconds"], state["curve"]
        self.best, self.started_from = tuple(state["best"]), state["started_from"]
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(tensors[f"weights.{name}"])
                found = {
                    key.split(".")[1]: value for key, value in tensors.items()
                    if key.startswith("optimizer.") and key.split(".", 2)[2] == name
                }  # fmt: skip
                if found:
                    found["step"] = found["step"].to(self.device if self.device.type == "cuda" else "cpu")
                    self.optimizer.state[parameter] = found
        self.best_weights = {
            name.removeprefix("best."): tensor for name, tensor in tensors.items() if name.startswith("best.")
        }

    def heldout_loss(self) -> float:
        return math.log(perplexity(self.model.eval(), self.heldout_tokens, length=self.settings.length).perplexity)

    def train(self, *, evaluate_every: int = 250, save_every: int = 1000, seconds_limit: float = math.inf) -> bool:
        """Run to the last step, or until `seconds_limit`; True when the last step was reached."""
        settings, started = self.settings, time.monotonic()
        before = self.seconds
        self._last_report = (self.step, self.seconds)
        self.model.train()
        advance = self._advance()
        while self.step < settings.steps:
            rate = learning_rate(self.step, settings)
            self._set_rate(rate)
            terms = advance(self._draw(self.step))
            self.step += 1
            self.seconds = before + time.monotonic() - started
            if self.step % evaluate_every == 0 or self.step == settings.steps:
                self._evaluate(terms, rate)
                self.seconds = before + time.monotonic() - started
                self.model.train()
            out_of_time = time.monotonic() - started > seconds_limit
            if self.step % save_every == 0 or self.step == settings.steps or out_of_time:
                self.save()
            if out_of_time:
                break
        return self.step >= settings.steps

    def _draw(self, step: int) -> Batch:
        return draw_batch(self.train_tokens, self.dialogues, self.beginnings, step, self.settings)

    def _advance(self) -> Callable[[Batch], dict[str, Tensor]]:
        """The function that makes one step from a batch on the host."""
        if self.eager:
            return self._eager_step
        if self._captured is None:
            started = time.monotonic()
            self._captured = CapturedStep(self._update, self._draw(self.step), self.optimizer, self.device)
            memory = torch.cuda.memory_reserved(self.device) / 2**30
            print(
                f"one CUDA graph per step, captured in {time.monotonic() - started:.1f} s, {memory:.1f} GiB reserved",
                flush=True,
            )
        return self._captured

    def _eager_step(self, batch: Batch) -> dict[str, Tensor]:
        self.optimizer.zero_grad(set_to_none=True)
        return self._update(batch.to(self.device))

    def _update(self, batch: Batch) -> dict[str, Tensor]:
        """Forward, backward, clip and optimizer step of a batch on the device; gradients must be None before.

        Returns the terms of the loss and the gradient norm before clipping, without a graph of autograd.
        """
        terms = losses(self.model, batch, self.settings)
        terms["total"].backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, error_if_nonfinite=False)
        self.optimizer.step()
        return {name: value.detach() for name, value in terms.items()} | {"gradient_norm": norm.detach()}

    def _set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _evaluate(self, terms: dict[str, Tensor], rate: float) -> None:
        values = {name: value.item() for name, value in terms.items()}
        if not math.isfinite(values["total"]) or not math.isfinite(values["gradient_norm"]):
            raise InputError(
                f"step {self.step}: expected a finite loss and gradient, found {values['total']} and "
                f"{values['gradient_norm']}; lower the learning rate"
            )
        settings, seconds = self.settings, self.seconds
        heldout = self.heldout_loss()
        fit = dialogue_fit(self.model.eval(), self.validation) if self.validation else None
        score = heldout if fit is None else heldout + 1.0 - fit.exact
        if score < self.best[0]:
            self.best = (score, self.step)
            self.best_weights = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        validation = {} if fit is None else {"validation": fit.loss, "validation_exact": fit.exact}
        self.curve.append(
            {"step": self.step, **self.tokens_seen(self.step), **values, "heldout": heldout, **validation,
             "learning_rate": rate, "seconds": round(seconds, 1)}
        )  # fmt: skip
        self._write_curve()
        last_step, last_seconds = self._last_report
        self._last_report = (self.step, seconds)
        pace = (seconds - last_seconds) / (self.step - last_step)  # seconds a step, evaluations included
        dialogue = "" if fit is None else (
            f"  dialogue {values['dialogue_next']:.3f}  validation {fit.loss:.4f} exact {fit.exact:.1%}"
        )  # fmt: skip
        print(
            f"step {self.step}/{settings.steps}  next {values['next']:.3f}  draft {values['draft']:.3f}  "
            f"balance {values['balance']:.2f}  held-out {heldout:.4f}{dialogue}  best {self.best[0]:.4f} at "
            f"{self.best[1]}  norm {values['gradient_norm']:.2f}  "
            f"{settings.batch * settings.length / max(pace, 1e-9) / 1e3:.0f}k tokens/s  {seconds:.0f} s, "
            f"{pace * (settings.steps - self.step):.0f} s to go",
            flush=True,
        )

    def tokens_seen(self, step: int) -> dict[str, int]:
        """Tokens read up to `step`, of text and of dialogues."""
        per_row = step * self.settings.length
        return {
            "text_tokens": per_row * self.settings.text_rows,
            "dialogue_tokens": per_row * self.settings.dialogue_rows,
        }

    def _write_curve(self) -> None:
        text = io.StringIO()
        if self.curve:
            writer = csv.DictWriter(text, fieldnames=list(self.curve[0]))
            writer.writeheader()
            writer.writerows(
                {key: round(value, 6) if isinstance(value, float) else value for key, value in row.items()}
                for row in self.curve
            )
        write_atomic(self.out / "curve.csv", text.getvalue().encode())

    def export(self, command: str, extra_files: Mapping[str, bytes] | None = None) -> dict[str, object]:
        """Write the best weights as a checkpoint in bf16 with `extra_files`, and training.json with their figures."""
        tensors = {name: tensor.cpu() for name, tensor in self.best_weights.items()}
        folder = self.out / "checkpoint"
        write_checkpoint(folder, self.config, tensors, layout="official", dtype=torch.bfloat16, extra_files=extra_files)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                value = self.best_weights[name]
                wide = name.endswith(("A_log", "linear_attn.norm.weight"))
                parameter.copy_(value if wide else value.bfloat16())
        model = self.model.eval()
        heldout = perplexity(model, self.heldout_tokens)
        drafts = draft_acceptance(model, self.heldout_tokens)
        fit = dialogue_fit(model, self.validation) if self.validation else None
        unigram = unigram_perplexity(self.train_tokens, self.heldout_tokens, vocab_size=self.config.vocab_size)
        figures = {
            "command": command,
            **({} if self.started_from is None else {"started_from": self.started_from}),
            "settings": dataclasses.asdict(self.settings),
            "step": self.best[1],
            "seconds": round(self.seconds, 1),
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "train_tokens": len(self.train_tokens),
            "train_dialogues": 0 if self.dialogues is None else len(self.dialogues.starts),
            "train_dialogue_tokens": 0 if self.dialogues is None else len(self.dialogues.tokens),
            **{f"{name}_seen": count for name, count in self.tokens_seen(self.best[1]).items()},
            "heldout_perplexity": heldout.perplexity,
            "heldout_predicted_tokens": heldout.predicted,
            "unigram_perplexity": unigram,
            "draft_acceptance": drafts.rate,
            "validation_dialogues": sum(batch.tokens.shape[0] for batch in self.validation),
            "validation_loss": None if fit is None else fit.loss,
            "validation_exact": None if fit is None else fit.exact,
            "hardware": torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu",
            "versions": {"workbench": __version__, "torch": torch.__version__, "python": sys.version.split()[0]},
        }
        write_atomic(folder / "training.json", (json.dumps(figures, indent=1) + "\n").encode())
        return figures


@one_line_errors
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m workbench.training.train", description=__doc__.split("\n\n")[0],
        epilog="example: python -m workbench.training.train --tokens corpus --out run --device cuda",
    )  # fmt: skip
    parser.add_argument("--tokens", type=Path, required=True, help="directory with the token files")
    parser.add_argument("--out", type=Path, required=True, help="directory of the run; made when missing")
    parser.add_argument("--tokenizer", type=Path, help=f"directory of {', '.join(TOKENIZER_FILES)}")
    parser.add_argument("--start-from", type=Path, help="checkpoint directory to take the first weights from")
    parser.add_argument("--eager", action="store_true", help="no CUDA graph: run each step kernel by kernel")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--resume", action="store_true", help="go on from the last save in --out")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop (resumable) after this many seconds")
    parser.add_argument("--evaluate-every", type=int, default=250, help="steps between evaluations")
    parser.add_argument("--save-every", type=int, default=1000, help="steps between saves")
    for field in dataclasses.fields(Settings):
        name = "--" + field.name.replace("_", "-")
        parser.add_argument(name, type=type(field.default), default=field.default, help=f"default {field.default}")
    arguments = parser.parse_args(argv)
    # TF32 products keep fp32's range; they only shorten the mantissa of the inputs of a matrix product.
    torch.backends.cuda.matmul.allow_tf32 = True
    for name in ("evaluate_every", "save_every"):
        if getattr(arguments, name) < 1:
            raise InputError(f"{name}: expected at least one step, found {getattr(arguments, name)}")
    settings = Settings(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(Settings)})
    extra_files = None if arguments.tokenizer is None else read_tokenizer_files(arguments.tokenizer)
    run = Run(
        arguments.tokens, arguments.out, settings, arguments.device,
        eager=arguments.eager, start_from=arguments.start_from,
    )  # fmt: skip
    if run.eager and not arguments.eager:
        print(f"device {run.device}: no CUDA graph there, each step runs op by op", flush=True)
    if arguments.resume:
        run.resume()
    finished = run.train(
        evaluate_every=arguments.evaluate_every, save_every=arguments.save_every, seconds_limit=arguments.seconds
    )
    if finished:
        command = "python -m workbench.training.train " + " ".join(sys.argv[1:] if argv is None else argv)
        print(json.dumps(run.export(command, extra_files), indent=1))
    else:
        print(f"stopped at step {run.step} of {settings.steps}; the same command with --resume goes on")
    return 0


if __name__ == "__main__":
    sys.exit(main())
