"""Watching a model's own routers: what each of them was given, and what it chose."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench import provenance
from workbench.analysis.routing.record import (
    MOST_EXPERTS,
    RoutingPart,
    RoutingPrompt,
    RoutingRecord,
    check_ids,
    stack_parts,
)
from workbench.bundle import Origin
from workbench.errors import BackendError, InputError
from workbench.kernels import Attestation, Kernels
from workbench.model import CausalLM


class SeenRouting:
    """A model's kernels, whose router shows `see(logits, weights, experts)` what it was given and what it chose."""

    def __init__(self, kernels: Kernels, see: Callable[[Tensor, Tensor, Tensor], None]):
        self._kernels, self._see = kernels, see

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def routing(self, logits: Tensor, **settings: Any) -> tuple[Tensor, Tensor]:
        weights, experts = self._kernels.routing(logits, **settings)
        self._see(logits, weights, experts)
        return weights, experts


@contextmanager
def seen_routing(model: CausalLM, see: Callable[[Tensor, Tensor, Tensor], None]) -> Iterator[None]:
    """`see` is called at every router of `model`, in the order of its layers; backends and counts stay the model's."""
    kernels = model.kernels
    model.kernels = SeenRouting(kernels, see)
    try:
        yield
    finally:
        model.kernels = kernels


def measure(logits: Tensor, weights: Tensor, experts: Tensor, *, keep_logits: bool = False) -> dict[str, Any]:
    """The arrays of one layer, see `RoutingPart`, without its first axis.

    logits [T, E] of any float dtype, weights and experts [T, A] as the router returned them. Raises BackendError for
    an expert that there is not, which a faulty router may choose.
    """
    count, top_k = logits.shape[-1], experts.shape[-1]
    values = logits if logits.dtype == torch.float64 else logits.float()
    probabilities = torch.softmax(values, dim=-1)
    bad = ~(torch.isfinite(probabilities).all(-1) & torch.isfinite(weights).all(-1))
    if bool(((experts < 0) | (experts >= count)).any()):
        raise BackendError(
            f"routing: expected experts from 0 to {count - 1}, found {int(experts.min())} to {int(experts.max())}; "
            "force another backend of routing"
        )
    mass = probabilities.gather(-1, experts).sum(-1)
    entropy = torch.special.entr(probabilities).sum(-1)
    ranked = values.topk(min(top_k + 1, count), dim=-1).values
    if top_k < count:
        last, after = ranked[:, -2], ranked[:, -1]
        margin = torch.where(last == after, 0.0, last - after)  # two of -Inf are a tie as well
    else:
        margin = torch.full_like(mass, torch.inf)

    def kept(tensor: Tensor) -> np.ndarray:
        return tensor.float().cpu().numpy()

    return {
        "experts": torch.where(bad[:, None], -1, experts).to(torch.int16).cpu().numpy(),
        "weights": kept(weights),
        **{
            name: kept(torch.where(bad, torch.nan, tensor))
            for name, tensor in (("margin", margin), ("mass", mass), ("entropy", entropy))
        },
        "logits": kept(logits) if keep_logits else None,
    }


def stack_layers(
    rows: Sequence[dict[str, Any]], ids: Sequence[int], prompt: int, start: int = 0
) -> dict[str, np.ndarray | None]:
    """The arrays of one prompt from those of its layers."""
    return {
        "token": np.asarray(ids, dtype=np.int64),
        "prompt": np.full(len(ids), prompt, dtype=np.int32),
        "position": np.arange(start, start + len(ids), dtype=np.int32),
        **{name: None if rows[0][name] is None else np.stack([row[name] for row in rows]) for name in rows[0]},
    }


@torch.inference_mode()
def record(
    model: CausalLM,
    prompts: Iterable[RoutingPrompt | Sequence[int]],
    *,
    keep_logits: bool = False,
    model_hash: str | None = None,
    seed: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> RoutingRecord:
    """What every router of `model` does to every token of `prompts`, each read by itself from an empty cache.

    The choices are those that the model's own router returned in the pass, interventions and broken backends
    included. The multi-token-prediction head, where there is one, reads every pair of a token's hidden row and the
    token after it; it is a part of its own. A token whose logits give no finite probabilities is marked (experts -1)
    and never counted as served.

    prompts      RoutingPrompt, or token ids alone
    keep_logits  keep the logits in fp32: L T E values, most of the memory with 256 experts
    model_hash, seed   go into `origin` as they are
    progress     called after each layer of each prompt with the pairs of layer and token done, and their number

    Raises, before anything runs, InputError for a model without experts, no prompts, a prompt without tokens or with
    more than max_position_embeddings, and ids that are not in the vocabulary; BackendError for a router that chooses
    an expert that there is not.
    """
    config = model.config
    if not config.is_moe:
        raise InputError("record: expected a model with experts, found a dense one")
    if config.num_experts > MOST_EXPERTS:
        raise InputError(f"record: expected at most {MOST_EXPERTS} experts, found {config.num_experts}")
    asked = [given if isinstance(given, RoutingPrompt) else RoutingPrompt(tuple(given)) for given in prompts]
    if not asked:
        raise InputError("record: expected at least one prompt, found none")
    for number, prompt in enumerate(asked):
        if not 1 <= len(prompt.ids) <= config.max_position_embeddings:
            raise InputError(
                f"record: prompt {number}: expected 1 to {config.max_position_embeddings} tokens "
                f"(max_position_embeddings), found {len(prompt.ids)}; leave it out or cut it"
            )
        check_ids(prompt.ids, config.vocab_size, f"record: prompt {number}" + (prompt.title and f" ({prompt.title})"))
    layers = [layer for layer, kind in enumerate(config.mlp_types) if kind == "sparse"]
    has_head = bool(config.mtp_num_hidden_layers) and config.mtp_mlp_type == "sparse"
    before = _rows(model.kernels)
    seen: list[dict[str, Any]] = []
    total = sum(len(p.ids) * len(layers) + (len(p.ids) - 1) * has_head for p in asked)
    done = 0

    def see(logits: Tensor, weights: Tensor, experts: Tensor) -> None:
        nonlocal done
        seen.append(measure(logits, weights, experts, keep_logits=keep_logits))
        done += len(logits)
        if progress is not None:
            progress(done, total)

    main, head = [], []
    for number, prompt in enumerate(asked):
        ids = torch.tensor([prompt.ids], dtype=torch.int64, device=model.device)
        with seen_routing(model, see):
            hidden = model(ids, use_cache=False, last_only=True).hidden
            if has_head and len(prompt.ids) > 1:
                model.mtp_logits(hidden[:, :-1], ids[:, 1:])
        calls = len(layers) + (has_head and len(prompt.ids) > 1)
        if len(seen) != calls:
            raise BackendError(f"record: expected {calls} calls of the router in a pass, found {len(seen)}")
        main.append(stack_layers(seen[: len(layers)], prompt.ids, number))
        if len(seen) > len(layers):
            head.append(stack_layers(seen[len(layers) :], prompt.ids[:-1], number))
        seen.clear()
    parts: list[RoutingPart] = [stack_parts("model", layers, main)]
    if head:
        parts.append(stack_parts("mtp", (0,), head))
    backends = [
        since.to_json()
        for key, row in _rows(model.kernels).items()
        if (since := row if key not in before else _since(row, before[key])).calls
    ]
    origin = Origin(
        model_hash=model_hash, backends=tuple(backends), policy=model.kernels.policy.to_json(),
        versions=provenance.versions(), seed=seed,
        card=torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else None,
    )  # fmt: skip
    router_dtype = model.kernels.router_dtype
    return RoutingRecord(
        config.num_experts, config.num_experts_per_tok, config.norm_topk_prob, _name(model.dtype), tuple(asked),
        tuple(parts), router_dtype=None if router_dtype is None else _name(router_dtype), origin=origin,
    )  # fmt: skip


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _since(row: Attestation, before: Attestation) -> Attestation:
    """What was counted after `before`."""
    counts = ("calls", "retries", "routed", "cast")
    earlier = dict(before.paths)
    paths = tuple((path, count - earlier.get(path, 0)) for path, count in row.paths if count > earlier.get(path, 0))
    return replace(row, paths=paths, **{name: getattr(row, name) - getattr(before, name) for name in counts})


def _rows(kernels: Kernels) -> dict[tuple[str, str, str, str, str], Attestation]:
    return {(row.op, row.backend, row.device, row.dtype, row.tokens): row for row in kernels.attestation()}


def record_of_logits(
    logits: np.ndarray,
    *,
    top_k: int,
    normalise: bool = True,
    prompts: Sequence[RoutingPrompt] | None = None,
    layers: Sequence[int] | None = None,
    backend: str | None = None,
    keep_logits: bool = True,
) -> RoutingRecord:
    """The record of routers whose logits are at hand: of a synthetic router, or of kept logits under another `top_k`.

    logits [L, T, E] float32; `prompts` have T tokens in all (default: one prompt with the ids 0 to T - 1); `layers`
    default to 0 to L - 1; `backend` names one of the op `routing`. Raises InputError for shapes that do not fit.
    """
    if not isinstance(logits, np.ndarray) or logits.ndim != 3 or not logits.size:
        found = getattr(logits, "shape", type(logits).__name__)
        raise InputError(f"record_of_logits: expected logits [layers, tokens, experts], found {found}")
    depth, tokens, count = logits.shape
    if type(top_k) is not int or not 1 <= top_k <= count:
        raise InputError(f"record_of_logits: top_k: expected a whole number from 1 to {count}, found {top_k!r}")
    given = (RoutingPrompt(tuple(range(tokens))),) if prompts is None else tuple(prompts)
    total = sum(len(prompt.ids) for prompt in given)
    numbers = tuple(range(depth)) if layers is None else tuple(layers)
    if total != tokens or len(numbers) != depth:
        raise InputError(
            f"record_of_logits: expected prompts of {tokens} tokens and {depth} layers, found {total} and "
            f"{len(numbers)}"
        )
    kernels = Kernels({} if backend is None else {"routing": backend})
    rows = []
    for layer in logits:
        values = torch.from_numpy(np.ascontiguousarray(layer, dtype=np.float32))
        weights, experts = kernels.routing(values, top_k=top_k, normalise=normalise)
        rows.append(measure(values, weights, experts, keep_logits=keep_logits))
    stacked = stack_layers(rows, [token for prompt in given for token in prompt.ids], 0)
    lengths = [len(prompt.ids) for prompt in given]
    stacked["prompt"] = np.repeat(np.arange(len(given), dtype=np.int32), lengths)
    stacked["position"] = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])
    origin = Origin(policy=kernels.policy.to_json(), versions=provenance.versions())
    return RoutingRecord(
        count, top_k, normalise, "float32", given, (stack_parts("model", numbers, [stacked]),), origin=origin
    )


def rerouted(record: RoutingRecord, *, top_k: int | None = None, temperature: float = 1.0) -> RoutingRecord:
    """The main part routed anew from kept logits l, each layer by itself: what the router would choose.

    Weights, mass and entropy are of softmax(l / temperature), in float64; the experts and their order are those of l
    whatever the temperature, also where it leaves probabilities too small to differ. The record's logits become
    (l - max l) / temperature. Nothing downstream is computed again: a layer's logits are those of the original run.

    Raises InputError for a record without logits and a temperature that is no normal float32 above 0.
    """
    part = record.part("model")
    if part.logits is None:
        raise InputError("rerouted: expected a record with logits, found none; record with keep_logits=True")
    least, most = (float(limit) for limit in (np.finfo(np.float32).tiny, np.finfo(np.float32).max))
    is_number = isinstance(temperature, int | float | np.number) and not isinstance(temperature, bool)
    if not (is_number and least <= temperature <= most):
        raise InputError(
            f"rerouted: temperature: expected a number from {least:.2g} to {most:.2g}, found {temperature!r}"
        )
    base = record_of_logits(
        part.logits, top_k=record.top_k if top_k is None else top_k, normalise=record.normalise,
        prompts=record.prompts, layers=part.layers,
    )  # fmt: skip
    if temperature == 1:
        return base
    rows = [
        _tempered(torch.from_numpy(logits), torch.from_numpy(experts), float(temperature), record.normalise)
        for logits, experts in zip(part.logits, base.parts[0].experts, strict=True)
    ]
    changed = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    return replace(base, parts=(replace(base.parts[0], **changed),))


def _tempered(logits: Tensor, experts: Tensor, temperature: float, normalise: bool) -> dict[str, np.ndarray]:
    """`measure` of one layer's logits / temperature under a choice that is made; experts [T, A], -1 for a bad token."""
    values = logits.double()
    values = (values - values.amax(-1, keepdim=True)) / temperature
    chosen = experts.long().clamp(min=0)
    weights = torch.softmax(values, dim=-1).gather(-1, chosen)
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return measure(values, weights, chosen, keep_logits=True)
