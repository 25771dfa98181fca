"""Whether a checkpoint runs in float16, where it does not, and the cheapest remedy that a rerun proves.

Two runs of one prompt: in float32, where every value that a float16 model would hold in float16 is measured, and in
float16. Float16 serves where its logits are finite and as close to float32's as its rounding lets them be. How close
that is is measured too: float32 runs that round to float16's 11 bits wherever the float16 model does, with no limit of
range (`watch.rounded`), once to nearest and SEEDS times at random. Where float16 is further off than ROUNDING_FACTOR
times the worst of these, range is what it lacks, and remedies are tried, each by a rerun in float16, cheapest first.
Distances are taken with the experts that the float32 run chose, in runs of their own: a router that all but ties takes
another expert for any rounding at all (`watch.RoutedKernels`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

from workbench import taps
from workbench.analysis.gates import gate_table
from workbench.analysis.half_precision.islands import HEAD_PART, Islands, build, part_of
from workbench.analysis.half_precision.watch import (
    STREAM,
    Watch,
    round_to_half_bits,
    rounded,
    routed,
    watched,
)
from workbench.analysis.half_precision.weights import (
    STREAM_WRITERS,
    Scaled,
    StreamPlan,
    UnitPlan,
    half,
    stream_bits,
    weight_table,
)
from workbench.analysis.half_precision.wording import not_finite_verdict, verdict_of
from workbench.analysis.verdict import Verdict
from workbench.cards import Card
from workbench.checkpoint import Checkpoint, read_checkpoint
from workbench.config import ModelConfig
from workbench.errors import InputError
from workbench.kernels import Kernels
from workbench.kernels.agreement import logit_difference
from workbench.model import CausalLM

#: Runs of the rounding alone, besides the one to nearest.
SEEDS = 3
#: Logits further from float32's than this many times the worst of them are not explained by rounding.
ROUNDING_FACTOR = 2.0
#: Rounds in which an island grows by the part that the rerun before showed to be at fault.
GROWTHS = 3

#: Columns of `Readiness.remedies`. `same_experts` is the logit difference from the float32 run with the experts of that
#: run, which decides; `difference` that of the rerun itself, `flips` its tokens, over all layers, with other experts;
#: `from_plain` the difference from the float16 run without a remedy (inf where that is not finite). Counts are of
#: weights on load and of values in the rerun.
REMEDY_COLUMNS = (
    "remedy", "finite", "serves", "same_experts", "difference", "flips", "from_plain", "weights_overflow",
    "weights_flush", "values_bad", "values_flush", "first_bad", "extra_bytes", "wide_flops", "activation_bytes",
    "writable", "changes",
)  # fmt: skip

#: What `held` says of attention's scores: the op has them inside, and in a dtype of its own.
SHOWN_ALONE = "inside the op"

#: What may become of the norms' eps, those that a checkpoint can hold first: see `weights.StreamPlan`.
STREAM_EPS = ("kept", "shared", "own")

#: Tap points and last projections whose values are writes into the residual stream, or the stream itself.
_STREAM_NAMES = (taps.MIXER_OUT, taps.MOE_OUT, taps.MOE_EXPERTS, taps.MOE_SHARED, "down_proj.output", taps.EMBED)


@dataclass(frozen=True, slots=True)
class Remedy:
    """What is done to a model before it runs in float16: weights moved by powers of two, and parts left in float32."""

    name: str
    units: UnitPlan | None = None
    stream: StreamPlan | None = None
    islands: Islands = field(default_factory=Islands)

    @property
    def is_writable(self) -> bool:
        """Whether a checkpoint can hold it: weights and a config, no parts in float32 and no eps of single norms."""
        return not self.islands and not (self.stream is not None and self.stream.eps == "own")

    def scaled(self, config: ModelConfig, tensors: Mapping[str, Tensor]) -> Scaled:
        """The weights that it changes, from the original ones."""
        result = Scaled(config, {})
        if HEAD_PART in self.islands.parts and config.tie_word_embeddings and self.stream is None:
            result = untied(result, tensors)
        if self.units is not None:
            result = self.units.apply(result, tensors)
        return result if self.stream is None else self.stream.apply(result, tensors)


def untied(before: Scaled, tensors: Mapping[str, Tensor]) -> Scaled:
    """A head of its own with the weights of the embedding: one of them can then be wide."""
    head = tensors["embed_tokens.weight"].clone()
    config = replace(before.config, tie_word_embeddings=False)
    return replace(before, config=config, tensors={**before.tensors, "lm_head.weight": head},
                   extra_bytes=before.extra_bytes + 2 * head.numel(),
                   moved=(*before.moved, "lm_head no longer the embedding"))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Half:
    """A run in float16: logits, those with the experts of the float32 run, what was watched, what became of weights."""

    logits: Tensor
    same_experts: Tensor
    watch: Watch
    table: pd.DataFrame
    weights: pd.DataFrame

    @property
    def is_finite(self) -> bool:
        return bool(self.logits.isfinite().all() and self.same_experts.isfinite().all())

    @property
    def first_bad(self) -> pd.Series | None:
        bad = self.table[(self.table["bad"] > 0) & ~is_shown_alone(self.table)]
        return None if bad.empty else bad.iloc[0]


@dataclass(frozen=True, slots=True)
class Readiness:
    """The report.

    verdict      no fault where float16 serves as it is; else what fails, where, and the remedy that a rerun proved
    weights      see `weights.weight_table`: what float16 makes of each tensor on load
    activations  see `watch.COLUMNS`, of the float32 run; then `held` (dtype of this tensor in the float16 run),
                 `fault` (it overflows in what it is held in), `bad_float16` (its values not finite in the float16 run)
    gates        see `gates.gate_table`; empty for a model without linear layers
    remedies     see REMEDY_COLUMNS, in the order tried, the first row (`none`) without any
    difference   of the float16 logits from float32's with the same experts, inf where they are not finite
    rounding     the same of the runs that round alone, the worst of them; `limit` is what still counts as rounding
    remedy       the first that serves, None where none is needed or none does
    logits       of the float32 run, [B, T, vocabulary]
    """

    verdict: Verdict
    weights: pd.DataFrame
    activations: pd.DataFrame
    gates: pd.DataFrame
    remedies: pd.DataFrame
    difference: float
    rounding: float
    limit: float
    remedy: Remedy | None
    config: ModelConfig
    tokens: int
    logits: Tensor

    def to_json(self) -> dict[str, object]:
        """The verdict's fields, the numbers, and the tables as lists of rows."""
        return {
            **self.verdict.to_json(), "tokens": self.tokens, "difference": self.difference, "rounding": self.rounding,
            "limit": self.limit, "remedy": None if self.remedy is None else self.remedy.name,
            **{name: getattr(self, name).astype(object).to_dict("records")
               for name in ("remedies", "weights", "activations", "gates")},
        }  # fmt: skip

    def remedied(self, tensors: Mapping[str, Tensor]) -> Scaled:
        """Config and all weights with the remedy applied, float16 as the loader casts them, for `write_checkpoint`.

        `tensors` are those of the checkpoint by canonical name. Raises InputError where there is no remedy that a
        checkpoint can hold.
        """
        if self.remedy is None or not self.remedy.is_writable:
            found = "none" if self.remedy is None else f"{self.remedy.name}, which is no change of weights alone"
            raise InputError(f"remedy: expected one that weights and config can hold, found {found}")
        scaled = self.remedy.scaled(self.config, tensors)
        everything = {name: half(name, tensor) for name, tensor in {**tensors, **scaled.tensors}.items()}
        return Scaled(scaled.config, everything, scaled.eps, scaled.moved, scaled.extra_bytes)


def fp16_readiness(
    source: CausalLM | Checkpoint | str | Path, input_ids: Tensor, *, kernels: Kernels | None = None,
    card: Card | None = None, every: bool = False, progress: Callable[[str], None] | None = None,
) -> Readiness:  # fmt: skip
    """Whether the model or checkpoint `source` runs in float16 on the prompt `input_ids` [B, T]; see the module's text.

    Weights are taken in the dtype that they are held in: a model that was loaded in float16 has lost already what this
    is to find, and is refused. `kernels` says which backends, policy and router dtype the runs have; default: those of
    a model, else the automatic choice. The float16 runs rehearse `card` (default: the kernels' own), the float32 runs
    none. `every` tries all remedies, also after one that serves, for the table. `progress` is called with a line before
    each run. Nothing of `source` is changed. One pass over the prompt is what is judged: no decoding, no prediction
    head. Memory: beside the weights a float32 and a float16 copy of them. Raises InputError for a float16 model.
    """
    config, tensors, found = _source(source)
    kernels = kernels or found
    judge = _Judge(
        config, tensors, input_ids, partial(_kernels_like, kernels), card or kernels.card,
        progress or (lambda line: None),
    )  # fmt: skip
    return judge.judge(every=every)


def _source(source: CausalLM | Checkpoint | str | Path) -> tuple[ModelConfig, dict[str, Tensor], Kernels]:
    if isinstance(source, CausalLM):
        tensors = {name: tensor.detach() for name, tensor in source.state_dict().items()}
        config, kernels = source.config, source.kernels
    else:
        checkpoint = source if isinstance(source, Checkpoint) else read_checkpoint(source)
        tensors, config, kernels = checkpoint.tensors, checkpoint.config, Kernels()
    if isinstance(source, CausalLM) and source.dtype == torch.float16:
        raise InputError(
            "model: expected weights as the files hold them (bfloat16 or float32), found a model in float16, whose "
            "overflows and flushes are done; load it without dtype, and without a card, which chooses one"
        )
    return config, dict(tensors), kernels


def _kernels_like(kernels: Kernels, card: Card | None = None) -> Kernels:
    return Kernels(kernels.requested, kernels.policy, kernels.router_dtype, strict=kernels.strict, card=card)


class _Judge:
    """The runs of one report, and what is kept of them."""

    def __init__(
        self, config: ModelConfig, tensors: dict[str, Tensor], input_ids: Tensor,
        make: Callable[..., Kernels], card: Card | None, progress: Callable[[str], None],
    ):  # fmt: skip
        self.config, self.tensors, self.make, self.card, self.progress = config, tensors, make, card, progress
        self.device = tensors["embed_tokens.weight"].device
        self.input_ids = input_ids.to(self.device)
        self.weights = weight_table(tensors)

    # ---- runs

    @torch.no_grad()
    def half_run(self, remedy: Remedy | None = None) -> Half:
        remedy = remedy or Remedy("none")
        scaled = remedy.scaled(self.config, self.tensors)
        everything = {**self.tensors, **scaled.tensors}
        model = build(scaled.config, everything, self.make(card=self.card), dtype=torch.float16, eps=scaled.eps)
        remedy.islands.apply(model, everything)
        with watched(model) as watch:
            logits = model(self.input_ids, use_cache=False).logits
        same = logits
        if self.watch.routes and logits.isfinite().all():
            with routed(model, self.watch.routes):
                same = model(self.input_ids, use_cache=False).logits
        weights = weight_table(everything) if scaled.tensors else self.weights
        return Half(logits, same, watch, watch.table, weights)

    @torch.no_grad()
    def wide_run(self) -> CausalLM:
        """Run in float32 and keep logits and watch; the model is returned for `rounding`."""
        self.progress("float32 run")
        model = build(self.config, self.tensors, self.make(), dtype=torch.float32)
        with watched(model) as self.watch:
            self.logits = model(self.input_ids, use_cache=False).logits
        return model

    @torch.no_grad()
    def rounding(self, model: CausalLM, held: Mapping[str, str]) -> float:
        """The difference that rounding alone makes, the worst of several runs; the weights of `model` are rounded.

        `held` says in which dtype the float16 run holds what a tap point shows.
        """
        names = frozenset(name for name, dtype in held.items() if dtype == "float16")
        for parameter_name, parameter in model.named_parameters():
            if self.tensors[parameter_name].dtype in (torch.float32, torch.float64) and parameter.dim() > 1:
                _round_in_place(parameter)
        model.to(torch.float32)
        worst = 0.0
        for seed in (None, *range(SEEDS)):
            self.progress(f"float32 run, rounded to the bits of float16 ({'nearest' if seed is None else 'at random'})")
            with routed(model, self.watch.routes), rounded(model, names, seed):
                logits = model(self.input_ids, use_cache=False).logits
            worst = max(worst, logit_difference(logits, self.logits))
        return worst

    # ---- the report

    def judge(self, *, every: bool) -> Readiness:
        model = self.wide_run()
        self.progress("float16 run")
        plain = self.half_run()
        activations = self._activations(plain)
        gates = gate_table(self.watch.log_decays, self.make().policy.chunk) if self.watch.log_decays else pd.DataFrame()
        found = {"weights": self.weights, "activations": activations, "gates": gates, "config": self.config,
                 "tokens": self.input_ids.shape[1], "logits": self.logits}  # fmt: skip
        if not self.logits.isfinite().all():
            unknown = dict.fromkeys(("difference", "rounding", "limit"), math.nan)
            return Readiness(not_finite_verdict(activations), remedies=self._table([]), remedy=None, **unknown, **found)
        rounding = self.rounding(model, dict(zip(plain.table["name"], plain.table["dtype"], strict=True)))
        del model
        limit = ROUNDING_FACTOR * max(rounding, 2.0**-11)
        tried = [self._row(Remedy("none"), plain, plain, limit)]
        chosen = None
        if not tried[0]["serves"]:
            for remedy, run in self._tries(plain, activations):
                tried.append(self._row(remedy, run, plain, limit))
                if tried[-1]["serves"] and chosen is None:
                    chosen = remedy
                if chosen is not None and not every:
                    break
        remedies = self._table(tried)
        verdict = verdict_of(activations, self.weights, gates, remedies, rounding, limit)
        return Readiness(verdict, remedies=remedies, difference=tried[0]["same_experts"], rounding=rounding,
                         limit=limit, remedy=chosen, **found)  # fmt: skip

    def _activations(self, plain: Half) -> pd.DataFrame:
        wide = self.watch.table
        half = plain.table.set_index("name")
        # An expert that float16's NaN sent nobody to, or the other way round, has a row in one run alone.
        wide["held"] = wide["name"].map(half["dtype"]).fillna("float16")
        wide["bad_float16"] = wide["name"].map(half["bad"]).fillna(0).astype(int)
        wide.loc[is_shown_alone(wide), "held"] = SHOWN_ALONE
        wide["fault"] = (wide["overflows"] > 0) & (wide["held"] == "float16")
        return wide

    def _row(self, remedy: Remedy, run: Half, plain: Half, limit: float) -> dict[str, object]:
        same = logit_difference(run.same_experts, self.logits)
        first = run.first_bad
        scaled = remedy.scaled(self.config, self.tensors)
        cost = remedy.islands.cost(scaled.config, {**self.tensors, **scaled.tensors})
        return {
            "remedy": remedy.name, "finite": run.is_finite, "serves": run.is_finite and same <= limit,
            "same_experts": same, "difference": logit_difference(run.logits, self.logits), "flips": self._flips(run),
            "from_plain": logit_difference(plain.logits, run.logits) if run.is_finite else math.inf,
            "weights_overflow": int(run.weights["overflows"].sum()), "weights_flush": int(run.weights["flushes"].sum()),
            "values_bad": int(run.table["bad"].sum()), "values_flush": self._flushed(run),
            "first_bad": None if first is None else first["name"],
            **cost | {"extra_bytes": cost["extra_bytes"] + scaled.extra_bytes}, "writable": remedy.is_writable,
            "changes": "; ".join([*scaled.moved, *remedy.islands.words()]) or "nothing",
        }  # fmt: skip

    def _flips(self, run: Half) -> int:
        """Tokens, over all layers, whose experts are not those of the float32 run, in whatever order."""
        pairs = zip(run.watch.routes, self.watch.routes, strict=True)
        return sum(int((a.sort(-1).values != b.sort(-1).values).any(-1).sum()) for a, b in pairs)

    def _flushed(self, run: Half) -> int:
        """Values that are zero in a float16 run and were not in float32, tensor by tensor."""
        narrow = run.table[run.table["dtype"] == "float16"]
        before = narrow["name"].map(self.watch.table.set_index("name")["zeros"])
        return int((narrow["zeros"] - before).clip(lower=0).fillna(0).sum())

    @staticmethod
    def _table(rows: list[dict[str, object]]) -> pd.DataFrame:
        return pd.DataFrame(rows, columns=list(REMEDY_COLUMNS))

    # ---- remedies

    def _tries(self, plain: Half, activations: pd.DataFrame) -> Iterator[tuple[Remedy, Half]]:
        """Every remedy that has something to do with what was found, cheapest first, with its rerun in float16."""
        faults = Faults.of(self, plain, activations)
        done: set[tuple] = set()
        for remedy in sorted(faults.remedies(), key=self._price):
            for growth in range(1 + GROWTHS):
                key = (remedy.units is not None, remedy.stream, remedy.islands)
                if key in done:
                    break
                done.add(key)
                self.progress(f"float16 run with {remedy.name}" + (", grown" if growth else ""))
                run = self.half_run(remedy)
                yield remedy, run
                first = run.first_bad
                part = None if run.is_finite or first is None else part_of(first["name"])
                if part is None or part in remedy.islands.parts or not remedy.islands.parts:
                    break
                islands = replace(remedy.islands, parts=tuple(sorted({*remedy.islands.parts, part})))
                remedy = replace(remedy, islands=islands)

    def _price(self, remedy: Remedy) -> tuple[int, ...]:
        """What remedies are ordered by: what a checkpoint can hold first, then time, memory, how much is touched."""
        scaled = remedy.scaled(self.config, self.tensors)
        cost = remedy.islands.cost(scaled.config, {**self.tensors, **scaled.tensors})
        return (not remedy.is_writable, cost["wide_flops"], cost["activation_bytes"],
                scaled.extra_bytes + cost["extra_bytes"], (remedy.units is not None) + (remedy.stream is not None))


@dataclass(frozen=True, slots=True)
class Faults:
    """What has to be set right, by what can do it.

    `names` are watched tensors and weights outside the range; `stream` those that moving the stream moves, `wide` those
    that a stream in float32 holds; `units` and `bits` the scalings that would do, `stream_from` the first layer at
    fault.
    """

    names: tuple[str, ...]
    stream: frozenset[str]
    wide: frozenset[str]
    units: UnitPlan
    bits: int
    stream_from: int | None

    @classmethod
    def of(cls, judge: _Judge, plain: Half, activations: pd.DataFrame) -> Faults:
        rows, weights = activations[activations["fault"]], judge.weights[judge.weights["overflows"] > 0]
        is_underflow = rows.empty and weights.empty and plain.is_finite
        if is_underflow:
            rows, weights = _small(activations), judge.weights[judge.weights["flushes"] > 0]
        names = [*weights["tensor"], *rows["name"]]
        first = plain.first_bad
        if not names and first is not None:
            names.append(first["name"])
        in_stream = activations[
            (activations["kind"] == STREAM) | activations["name"].str.endswith(_STREAM_NAMES)
        ]  # fmt: skip
        writers = judge.weights[judge.weights["tensor"].map(lambda name: STREAM_WRITERS.fullmatch(name) is not None)]
        moved = frozenset([*in_stream["name"], *writers["tensor"]])
        wide = frozenset(activations["name"][activations["kind"] == STREAM])
        bits = stream_bits(max(in_stream["absmax"].max(), writers["absmax"].max()))
        layers = [taps.split_name(name)[0] for name in names if name in wide]
        held = [layer for layer in layers if layer is not None]
        return cls(
            tuple(names), moved, wide, UnitPlan.of(judge.config, judge.tensors, judge.watch.channels),
            bits if is_underflow or moved & set(names) else 0,
            0 if is_underflow and moved & set(names) else min(held, default=None),
        )  # fmt: skip

    def remedies(self) -> Iterator[Remedy]:
        """Each scaling and island by itself, and all that go together."""
        units = [None, self.units] if self.units else [None]
        streams: list[tuple[str, StreamPlan | None, int | None]] = [("", None, None)]
        if self.bits:
            streams += [(f"stream scale, {eps} eps", StreamPlan(self.bits, eps), None) for eps in STREAM_EPS]
        if self.stream_from is not None:
            streams.append(("stream in float32", None, self.stream_from))
        for scaling, (word, plan, wide_from), has_parts in itertools.product(units, streams, (False, True)):
            cured = set() if scaling is None else set(scaling.cured)
            cured |= self.stream if plan is not None else self.wide if wide_from is not None else set()
            left = {part_of(name) for name in self.names if name not in cured} - {None} if has_parts else set()
            if has_parts and not left:
                continue
            islands = Islands(tuple(sorted(left)), wide_from)
            words = ["unit scale"] * (scaling is not None) + [word] * bool(word) + ["float32 island"] * bool(left)
            if words:
                yield Remedy(" + ".join(words), scaling, plan, islands)


def is_shown_alone(table: pd.DataFrame) -> pd.Series:
    """Rows of tensors that are computed for an observer alone: no op of the float16 run holds them."""
    return table["name"].str.endswith(taps.ATTN_SCORES)


def _small(activations: pd.DataFrame) -> pd.DataFrame:
    """Tensors held in float16 most of whose values are flushed or subnormal there."""
    lost = activations["flushes"] + activations["subnormals"]
    return activations[(activations["held"] == "float16") & (2 * lost > activations["values"])]


def _round_in_place(parameter: Tensor) -> None:
    parameter.data = round_to_half_bits(parameter.detach())
