"""Train a miniature on token files, with progress, resume and a curve.

    python -m workbench.training.train --tokens DIR --out DIR [--device cuda] [--steps 6000] [--resume]

`--tokens` holds train.u16 and heldout.u16 of `workbench.training.tokenize`; `--out` receives

    curve.csv          step, tokens seen, losses, held-out loss, seconds
    state.safetensors  weights, optimizer moments and the best weights so far; state.json beside it is written last
    checkpoint/         model.safetensors (bf16) and config.json of the lowest held-out loss, training.json with figures

Loss: cross-entropy of the next token + mtp_weight * cross-entropy of the token after next + router_aux_loss_coef *
load balance, E sum_e f_e P_e with f_e the share of token-expert pairs times A and P_e the mean probability, pooled
over all sparse layers (A when balanced). AdamW, linear warm-up, cosine to a tenth, gradients clipped to norm 1. The
draws of data depend on the seed and the step alone, so a resumed run sees what an uninterrupted one would have.
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
from collections.abc import Iterator
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
from workbench.checkpoint import write_checkpoint
from workbench.config import ModelConfig
from workbench.errors import InputError, WorkbenchError
from workbench.kernels import Kernels
from workbench.model import CausalLM, SparseBlock
from workbench.quality import draft_acceptance, perplexity
from workbench.training.corpus import write_atomic
from workbench.training.tokenize import read_tokens

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
    length: int = 1024
    learning_rate: float = 3e-3
    warmup: int = 100
    weight_decay: float = 0.1
    mtp_weight: float = 0.3
    seed: int = 1


def learning_rate(step: int, settings: Settings) -> float:
    """Linear from zero over `warmup` steps, then half a cosine down to a tenth of the peak."""
    if step < settings.warmup:
        return settings.learning_rate * (step + 1) / settings.warmup
    progress = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
    return settings.learning_rate * (0.1 + 0.9 * 0.5 * (1.0 + math.cos(math.pi * progress)))


def draw_batch(tokens: np.ndarray, step: int, settings: Settings) -> Tensor:
    """[batch, length + 2] of int64: random windows, the same for the same seed and step."""
    draws = np.random.default_rng((settings.seed, step))
    starts = draws.integers(0, len(tokens) - settings.length - 2, size=settings.batch)
    return torch.from_numpy(np.stack([tokens[s : s + settings.length + 2] for s in starts]).astype(np.int64))


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


def losses(model: CausalLM, batch: Tensor, mtp_weight: float) -> dict[str, Tensor]:
    """Terms of the loss for batch [B, T + 2]: next token, token after next, load balance, and their weighted total."""
    inputs, following, after_next = batch[:, :-2], batch[:, 1:-1], batch[:, 2:]
    with router_logits(model) as routed:
        out = model(inputs, use_cache=False)
        drafts = model.mtp_logits(out.hidden, following)
    following_loss = F.cross_entropy(out.logits.flatten(0, 1), following.flatten())
    draft_loss = F.cross_entropy(drafts.flatten(0, 1), after_next.flatten())
    balance = load_balance(routed, model.config.num_experts_per_tok)
    total = following_loss + mtp_weight * draft_loss + model.config.router_aux_loss_coef * balance
    return {"next": following_loss, "draft": draft_loss, "balance": balance, "total": total}


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Matrices decay; norms, gates (A_log, dt_bias) and convolutions do not: it would pull a gate's time constant."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.dim() >= 2 and not name.endswith("conv1d.weight")]
    others = [p for name, p in named if p.dim() < 2 or name.endswith("conv1d.weight")]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


class Run:
    """A training run and its files; `train` goes from the step reached to the last."""

    def __init__(self, tokens: Path, out: Path, settings: Settings, device: str, config: ModelConfig = MINIATURE):
        self.train_tokens = read_tokens(tokens / "train.u16")
        self.heldout_tokens = read_tokens(tokens / "heldout.u16")
        self.out, self.settings, self.config, self.device = out, settings, config, torch.device(device)
        out.mkdir(parents=True, exist_ok=True)
        # Every expert over every token: fixed shapes and no host sync, which is what a small model on a GPU needs.
        self.model = CausalLM(config, Kernels("experts=torch_dense")).init_weights(settings.seed, "realistic")
        self.model.to(self.device)
        self.optimizer = torch.optim.AdamW(
            parameter_groups(self.model, settings.weight_decay), lr=settings.learning_rate, betas=(0.9, 0.95),
            fused=self.device.type == "cuda",
        )  # fmt: skip
        self.step = 0
        self.seconds = 0.0
        self.best = (math.inf, 0)  # held-out loss, step
        self.best_weights: dict[str, Tensor] = {}
        self.curve: list[dict[str, float]] = []

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
            "best": self.best, "curve": self.curve,
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
        tensors = load_file(self.out / "state.safetensors", device=str(self.device))
        self.step, self.seconds, self.curve = state["step"], state["seconds"], state["curve"]
        self.best = tuple(state["best"])
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
        while self.step < settings.steps:
            self.model.train()
            rate = learning_rate(self.step, settings)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            batch = draw_batch(self.train_tokens, self.step, settings).to(self.device)
            terms = losses(self.model, batch, settings.mtp_weight)
            self.optimizer.zero_grad(set_to_none=True)
            terms["total"].backward()
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, error_if_nonfinite=False)
            self.optimizer.step()
            self.step += 1
            self.seconds = before + time.monotonic() - started
            if self.step % evaluate_every == 0 or self.step == settings.steps:
                self._evaluate(terms, norm.item(), rate)
            out_of_time = time.monotonic() - started > seconds_limit
            if self.step % save_every == 0 or self.step == settings.steps or out_of_time:
                self.save()
            if out_of_time:
                break
        return self.step >= settings.steps

    def _evaluate(self, terms: dict[str, Tensor], norm: float, rate: float) -> None:
        values = {name: value.item() for name, value in terms.items()}
        if not math.isfinite(values["total"]) or not math.isfinite(norm):
            raise InputError(
                f"step {self.step}: expected a finite loss and gradient, found {values['total']} and {norm}; "
                "lower the learning rate"
            )
        heldout, seconds = self.heldout_loss(), self.seconds
        if heldout < self.best[0]:
            self.best = (heldout, self.step)
            self.best_weights = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        seen = self.step * self.settings.batch * self.settings.length
        self.curve.append(
            {"step": self.step, "tokens": seen, **values, "heldout": heldout, "gradient_norm": norm,
             "learning_rate": rate, "seconds": round(seconds, 1)}
        )  # fmt: skip
        print(
            f"step {self.step}/{self.settings.steps}  next {values['next']:.3f}  draft {values['draft']:.3f}  "
            f"balance {values['balance']:.2f}  held-out {heldout:.4f} (best {self.best[0]:.4f} at {self.best[1]})  "
            f"norm {norm:.2f}  {seen / max(seconds, 1e-9) / 1e3:.0f}k tokens/s  {seconds:.0f} s",
            flush=True,
        )

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

    def export(self, command: str) -> dict[str, object]:
        """Write the best weights as a checkpoint in bf16, and training.json with the figures of those weights."""
        tensors = {name: tensor.cpu() for name, tensor in self.best_weights.items()}
        folder = self.out / "checkpoint"
        write_checkpoint(folder, self.config, tensors, layout="official", dtype=torch.bfloat16)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                value = self.best_weights[name]
                wide = name.endswith(("A_log", "linear_attn.norm.weight"))
                parameter.copy_(value if wide else value.bfloat16())
        model = self.model.eval()
        heldout = perplexity(model, self.heldout_tokens)
        drafts = draft_acceptance(model, self.heldout_tokens)
        unigram = unigram_perplexity(self.train_tokens, self.heldout_tokens, vocab_size=self.config.vocab_size)
        figures = {
            "command": command,
            "settings": dataclasses.asdict(self.settings),
            "step": self.best[1],
            "seconds": round(self.seconds, 1),
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "train_tokens": len(self.train_tokens),
            "heldout_perplexity": heldout.perplexity,
            "heldout_predicted_tokens": heldout.predicted,
            "unigram_perplexity": unigram,
            "draft_acceptance": drafts.rate,
            "hardware": torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu",
            "versions": {"workbench": __version__, "torch": torch.__version__, "python": sys.version.split()[0]},
        }
        write_atomic(folder / "training.json", (json.dumps(figures, indent=1) + "\n").encode())
        return figures


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m workbench.training.train", description=__doc__.split("\n\n")[0],
        epilog="example: python -m workbench.training.train --tokens corpus --out run --device cuda",
    )  # fmt: skip
    parser.add_argument("--tokens", type=Path, required=True, help="directory with train.u16 and heldout.u16")
    parser.add_argument("--out", type=Path, required=True, help="directory of the run; made when missing")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--resume", action="store_true", help="go on from the last save in --out")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop (resumable) after this many seconds")
    parser.add_argument("--evaluate-every", type=int, default=250, help="steps between held-out evaluations")
    for field in dataclasses.fields(Settings):
        name = "--" + field.name.replace("_", "-")
        parser.add_argument(name, type=type(field.default), default=field.default, help=f"default {field.default}")
    arguments = parser.parse_args(argv)
    settings = Settings(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(Settings)})
    # TF32 products keep fp32's range; they only shorten the mantissa of the inputs of a matrix product.
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        run = Run(arguments.tokens, arguments.out, settings, arguments.device)
        if arguments.resume:
            run.resume()
        finished = run.train(evaluate_every=arguments.evaluate_every, seconds_limit=arguments.seconds)
        if finished:
            command = "python -m workbench.training.train " + " ".join(sys.argv[1:] if argv is None else argv)
            print(json.dumps(run.export(command), indent=1))
        else:
            print(f"stopped at step {run.step} of {settings.steps}; the same command with --resume goes on")
    except WorkbenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
