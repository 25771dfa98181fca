"""`compare`: run both sides on the same tokens, align their tap points, and say what the difference is."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from workbench import taps
from workbench.analysis.compare import differences
from workbench.analysis.compare.hf import order_of, run_hf
from workbench.analysis.compare.saved import read_side
from workbench.analysis.compare.sides import HF, Models, Side, check_length, is_bundle, run_model, run_selection
from workbench.analysis.provenance import place
from workbench.analysis.stages import judge_passes, unit
from workbench.analysis.verdict import NOT_ESTABLISHED, Verdict, Where
from workbench.cards import Card, card_named
from workbench.errors import InputError
from workbench.model import CausalLM
from workbench.provenance import checkpoint_hash
from workbench.tokenizer import Tokenizer

SAME, ROUNDING, DIFFERENT = "same", "rounding", "different"

#: Times the largest error of its inputs that an op may show where there are no weights to judge it by: exp, norms and
#: routers make errors larger. Sound runs of the miniature reach 2.6, experts after a router that chose others.
GROWTH = 16.0


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """What two sides made of the same tokens. Side `a` is the reference of every ratio.

    verdict  `same` (every bit of every tensor that both show), `rounding` or `different at <op>`, with its evidence
    side     which departs there: `a`, `b`, `both`; None where nothing does or it cannot be told
    stages   a row for each pass and tap point that both show, in the order of computation:
        step, layer, tap, op, dtype_a, dtype_b
        equal             bit by bit
        finite_a, finite_b
        error             norm(b - a) / norm(a), Frobenius: the relative root mean square error
        max_error         max |b - a| / max |a|
        worst_row, worst_row_error   index of the row that differs most, its difference over the largest row norm
        roundings         error in unit roundoffs of `rounding`: the coarser dtype of the two, or the coarsest dtype
                          whose rounding is in what it is made from
        inherited         largest error of the tap points that it is made from
        limit             what the roundings of the coarser dtype explain of an op by itself
        own_a, own_b      error of each side beside float64 of its own inputs; NaN where that was not judged
        fault_a, fault_b  whether that is more than its roundings explain
    faults   the ops that depart from float64 of their own inputs and do not agree: side, step, tap, op, error, index
    flips    a row for each layer and token with other experts: layer, position, token, margin (of the logits, side a),
             replaced (experts), is_near_tie (margin below 1e-5)
    logits   a row for each position: step, position, finite, kl (nats, of b from a), top_a, top_b, top1_flip,
             difference, largest (both of the logits)
    not_compared   step, tap, reason
    """

    a: Side
    b: Side
    verdict: Verdict
    side: str | None
    stages: pd.DataFrame
    faults: pd.DataFrame
    flips: pd.DataFrame
    logits: pd.DataFrame
    not_compared: pd.DataFrame
    flip_rate: float | None = None
    summary: dict[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """`same`, `rounding` or `different`."""
        return self.verdict.verdict.partition(" ")[0]

    def to_json(self) -> dict[str, Any]:
        """The verdict with all tables, plain values."""

        def rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
            return frame.astype(object).where(~frame.isna(), None).to_dict("records")

        return {
            **self.verdict.to_json(), "side": self.side, "a": self.a.about(), "b": self.b.about(),
            "tokens": [ids.flatten().tolist() for ids in self.a.feeds], **self.summary, "stages": rows(self.stages),
            "faults": rows(self.faults), "flips": rows(self.flips), "logits": rows(self.logits),
            "not_compared": rows(self.not_compared),
        }  # fmt: skip

    def __str__(self) -> str:
        return "\n".join([self.verdict.verdict, *self.verdict.evidence])


def compare(
    checkpoint: str | Path | None,
    a: str | Path | CausalLM,
    b: str | Path | CausalLM,
    *,
    prompt: str | Sequence[int] | Tensor | None = None,
    decode: int = 0,
    dtype_a: str | None = None,
    dtype_b: str | None = None,
    device: str = "cpu",
    expert_layout: str | None = None,
    mapping_a: str | Path | Mapping[str, Any] | None = None,
    mapping_b: str | Path | Mapping[str, Any] | None = None,
    card_a: Card | str | None = None,
    card_b: Card | str | None = None,
) -> Comparison:
    """Run `a` and `b` on the same tokens and compare every tap point that both show.

    checkpoint  directory of the weights; None where both sides are models or saved bundles
    a, b        backends as in ``--backend`` (``[OP=]NAME[:POLICY]``, several separated by commas, ``auto``), a policy
                alone (``:factored``), ``hf`` for transformers, the directory of a saved bundle, or a model
    prompt      text, or token ids; a bundle brings its own
    decode      tokens to go on with after it, one a pass: those that side a finds likeliest, given to both
    dtype_a, dtype_b  of the weights of each side; None: as stored
    card_a, card_b  cards to rehearse, by profile or name (`cards.known_cards`); the dtype of such a side is the card's
                unless it is given. Not for models, bundles and ``hf``
    mapping_a, mapping_b  for a bundle with names of another engine, see `saved.read_mapping`

    `rounding` means that no op of either side is further from float64 of its own inputs than its dtype explains: what
    differs is rounding, or was made of it on the way (a token sent to other experts by a near tie is). `different at`
    names the first op where that is not so and the sides do not agree. Bundles without a checkpoint are judged by how
    errors grow from an op's inputs to its output, which names no side.

    One sequence; every tensor of both sides is held in memory until they are compared. Raises InputError,
    BackendError, PolicyError, CheckpointError in one line.
    """
    if decode < 0:
        raise InputError(f"compare: decode: expected 0 or more, found {decode}")
    cards = {
        name: card_named(card) if isinstance(card, str) else card for name, card in (("a", card_a), ("b", card_b))
    }
    for name, what in (("a", a), ("b", b)):
        if cards[name] is not None and (isinstance(what, CausalLM) or what == HF or is_bundle(what)):
            raise InputError(f"compare: card of side {name}: expected with backends or a policy, found {what!r}")
    dtype_a, dtype_b = (
        card.model_dtype if card is not None and dtype is None else dtype
        for card, dtype in ((cards["a"], dtype_a), (cards["b"], dtype_b))
    )
    given = {"a": (a, dtype_a, mapping_a), "b": (b, dtype_b, mapping_b)}
    models = Models(checkpoint, device, expert_layout)
    sides: dict[str, Side] = {}
    for name, (what, _, mapping) in given.items():
        if not isinstance(what, CausalLM) and is_bundle(what):
            sides[name] = read_side(Path(what), mapping)
        elif mapping is not None:
            raise InputError(f"compare: mapping of side {name}: expected with a saved bundle, found side {what!r}")
    if checkpoint is not None:
        _same_model(Path(checkpoint), given, sides)
    feeds = _feeds(checkpoint, prompt, sides)
    left = 0 if sides else decode
    for name, (what, dtype, _) in given.items():
        if name in sides:
            continue
        if isinstance(what, CausalLM):
            check_length(what, feeds, left)
            sides[name] = run_model(what, "model", feeds, left)
        else:
            model = models.of(dtype)
            check_length(model, feeds, left)
            if what == HF:
                sides[name] = run_hf(model, checkpoint, feeds, left)
            else:
                sides[name] = run_selection(model, what, feeds, left, cards[name])
        feeds, left = sides[name].feeds, 0
    for name, (_, dtype, _) in given.items():
        side = sides[name]
        if side.source == "bundle" and checkpoint is not None and not side.is_cut:
            model = models.of(dtype if dtype is not None else side.dtype)
            side.judged = judge_passes(model, side.passes).table
    _same_weights(a, b)
    return compare_sides(sides["a"], sides["b"])


def _same_model(checkpoint: Path, given: Mapping[str, tuple], sides: Mapping[str, Side]) -> None:
    """A saved run is judged by the weights of the checkpoint: they must be those that it was made with."""
    saved = {name: side.model_hash for name, side in sides.items() if side.model_hash is not None}
    if not saved:
        return
    expected = checkpoint_hash(checkpoint.parent if checkpoint.is_file() else checkpoint)
    for name, found in saved.items():
        if found != expected:
            raise InputError(
                f"compare: bundle {given[name][0]}: expected a run of the checkpoint {checkpoint} (hash "
                f"{expected[:12]}), found one of another (hash {found[:12]}); give its own, or two bundles alone"
            )


def _feeds(checkpoint: str | Path | None, prompt: Any, sides: Mapping[str, Side]) -> list[Tensor]:
    """The tokens of each pass: those of a bundle, else the prompt in one."""
    ids = None
    if isinstance(prompt, str):
        if checkpoint is None:
            raise InputError("compare: prompt: expected token ids where no checkpoint has a tokenizer, found text")
        folder = Path(checkpoint)
        ids = Tokenizer.from_directory(folder.parent if folder.is_file() else folder).encode(prompt)
    elif prompt is not None:
        given = torch.as_tensor(prompt)
        if given.dim() > 2 or (given.dim() == 2 and given.shape[0] != 1) or given.is_floating_point():
            raise InputError(
                f"compare: prompt: expected the token ids of one sequence, found {given.dtype} {tuple(given.shape)}"
            )
        ids = given.flatten().tolist()
    if ids is not None and not ids:
        raise InputError("compare: prompt: expected at least one token, found none")
    if not sides:
        if ids is None:
            raise InputError("compare: expected a prompt, found none; only saved bundles bring their own tokens")
        return [torch.tensor([ids])]
    found = {name: side.feeds for name, side in sides.items()}
    first, feeds = next(iter(found.items()))
    for name, other in found.items():
        if len(other) != len(feeds) or not all(map(_agree, feeds, other)):
            raise InputError(
                f"compare: expected the same tokens on both sides, found {_shapes(feeds)} in {sides[first].label} and "
                f"{_shapes(other)} in {sides[name].label} or other ids; save both with one prompt"
            )
    feeds = [max(same, key=lambda ids: int(ids.sum())) for same in zip(*found.values(), strict=True)]  # the known ones
    if ids is not None:
        if not _agree(torch.tensor([ids]), feeds[0]):
            raise InputError(
                f"compare: prompt: expected the {feeds[0].shape[1]} tokens of the bundle {sides[first].label}, found "
                "others; leave it out"
            )
        feeds[0] = torch.tensor([ids])
    if len(sides) == 1 and any(bool((ids < 0).any()) for ids in feeds):
        raise InputError(
            f"compare: {sides[first].label}: expected a bundle that says its tokens (input_ids), found one that does "
            "not; give the prompt that it was made with, of one pass"
        )
    return feeds


def _agree(one: Tensor, other: Tensor) -> bool:
    """Whether two rows of token ids are the same where both are known."""
    return one.shape == other.shape and bool(((one == other) | (one < 0) | (other < 0)).all())


def _shapes(feeds: Sequence[Tensor]) -> str:
    return " + ".join(str(ids.shape[1]) for ids in feeds) + " tokens"


def _same_weights(a: Any, b: Any) -> None:
    """Raise InputError for two models of other weights: each op would be right by its own."""
    if not (isinstance(a, CausalLM) and isinstance(b, CausalLM)) or a is b:
        return
    theirs = dict(b.named_parameters())
    for name, one in a.named_parameters():
        other = theirs.get(name)
        if other is None or other.shape != one.shape:
            raise InputError(f"compare: expected two models of one shape, found none or another at {name} in side b")
        coarser = max((one.dtype, other.dtype), key=unit)
        difference = differences.difference(one.detach().cpu(), other.detach().cpu())
        if difference.error > 2 * unit(coarser):
            raise InputError(
                f"compare: expected two models of the same weights, found {name} {difference.error:.3g} apart; "
                "compare backends, policies or dtypes of one checkpoint"
            )


# ---- the verdict


FAULT_COLUMNS = ("side", "step", "layer", "tap", "op", "dtype", "error", "limit", "index", "found", "expected")


def compare_sides(a: Side, b: Side) -> Comparison:
    """Compare two sides that ran; see `compare`."""
    if len(a.passes) != len(b.passes):
        raise InputError(f"compare: expected as many passes on both sides, found {len(a.passes)} and {len(b.passes)}")
    stages, left_out = differences.stage_table(a, b)
    if stages.empty:
        raise InputError(
            f"compare: expected a tap point that both sides show, found none in {a.label} and {b.label}; name theirs "
            "in a mapping file"
        )
    if "bundle" in (a.source, b.source):
        _refuse_shapes(left_out, a, b)
        _refuse_tokens(stages, a, b)
        _share_tokens(a, b)
    routing = differences.routing_flips(a, b)
    flips, logits = differences.flip_table(routing), differences.logit_table(a, b)
    is_judged = a.judged is not None and b.judged is not None
    unjudged = stages[_unjudged(a, b, stages)]
    faults = _in_order([_faults(a, b, stages), _grown(unjudged, flips)]) if is_judged else _grown(stages, flips)
    compared = None if routing is None else sum(int(part.compared.sum()) for part in routing.parts)
    summary = {
        "logit_summary": differences.logit_summary(logits),
        "routing": None if compared is None else {
            "choices": compared, "flips": int((~flips["is_near_tie"]).sum()) if len(flips) else 0,
            "near_ties": int(flips["is_near_tie"].sum()) if len(flips) else 0,
        },
        "judged": is_judged, "unjudged": len(unjudged),
    }  # fmt: skip
    verdict, side = _verdict(a, b, stages, faults, summary)
    cut_short = [f"the run of side {name} {one.interrupted}" for name, one in (("a", a), ("b", b)) if one.interrupted]
    verdict = dataclasses.replace(verdict, evidence=(*verdict.evidence, *cut_short))
    rate = None if not compared else len(flips) / compared
    return Comparison(a, b, verdict, side, stages, faults, flips, logits, left_out, rate, summary)


def _refuse_shapes(left_out: pd.DataFrame, a: Side, b: Side) -> None:
    shapes = left_out[left_out["reason"].str.startswith("shapes")]
    if len(shapes):
        row = shapes.iloc[0]
        raise InputError(
            f"compare: {row['tap']}: expected one shape in {a.label} and {b.label}, found {row['reason']}; give a "
            "mapping file with a transpose, reshape or slice"
        )


def _refuse_tokens(stages: pd.DataFrame, a: Side, b: Side) -> None:
    """Where a bundle does not say its tokens their embeddings must agree, if it has them."""
    if all(bool((ids >= 0).all()) for side in (a, b) for ids in side.feeds):
        return
    rows = stages[(stages["tap"] == taps.EMBED) & (stages["roundings"] > 2)]
    if len(rows):
        raise InputError(
            f"compare: expected the same tokens on both sides, found embeddings {rows.iloc[0]['error']:.3g} apart in "
            f"pass {rows.iloc[0]['step']} of {a.label} and {b.label}; save both with one prompt"
        )


def _share_tokens(a: Side, b: Side) -> None:
    """Where one side does not say its tokens they are those of the other."""
    for one, other in zip(a.passes, b.passes, strict=True):
        if one.input_ids.shape == other.input_ids.shape:
            known = one.input_ids if bool((one.input_ids >= 0).all()) else other.input_ids
            one.input_ids, other.input_ids = known.cpu(), known.cpu()


def _faults(a: Side, b: Side, stages: pd.DataFrame) -> pd.DataFrame:
    """Rows of either side that are at fault, without those where both sides agree within rounding."""
    agreed = stages[stages["error"] <= stages["limit"]]
    pairs = set(zip(agreed["step"], agreed["tap"], strict=True))
    frames = []
    for name, side in (("a", a), ("b", b)):
        rows = side.judged[side.judged["is_fault"]]
        is_apart = [key not in pairs for key in zip(rows["step"], rows["tap"], strict=True)]
        frames.append(rows.loc[rows.index[is_apart]].assign(side=name)[list(FAULT_COLUMNS)])
    return _in_order(frames)


def _in_order(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Faults in one table, in the order of computation."""
    found = pd.concat([frame for frame in frames if len(frame)] or frames[:1])
    order = order_of(sorted(set(found["tap"])))
    rank = [order.index(tap) for tap in found["tap"]]
    return found.assign(rank=rank).sort_values(["step", "rank", "side"])[list(FAULT_COLUMNS)].reset_index(drop=True)


def _unjudged(a: Side, b: Side, stages: pd.DataFrame) -> list[bool]:
    """Rows that were not judged by the weights on both sides: what they are made from was not seen."""
    judged = [
        set() if side.judged is None else set(zip(side.judged["step"], side.judged["tap"], strict=True))
        for side in (a, b)
    ]
    return [not all(key in known for known in judged) for key in zip(stages["step"], stages["tap"], strict=True)]


def _grown(stages: pd.DataFrame, flips: pd.DataFrame) -> pd.DataFrame:
    """Rows whose error is far more than their dtype explains and than that of what they are made from."""
    floor = stages["limit"].combine(stages["inherited"], max)
    grown = stages[(stages["error"] > stages["limit"]) & (stages["error"] > GROWTH * floor)]
    flipped = {taps.full_name(layer, tap) for layer in set(flips["layer"]) for tap in (taps.MOE_TOPK, taps.MOE_EXPERTS)}
    grown = grown[~grown["tap"].isin(flipped)]
    rows = grown.assign(side="", dtype=grown["dtype_b"], index=grown["worst_row"], found=math.nan, expected=math.nan)
    return rows[list(FAULT_COLUMNS)].reset_index(drop=True)


def _verdict(
    a: Side, b: Side, stages: pd.DataFrame, faults: pd.DataFrame, summary: Mapping[str, Any]
) -> tuple[Verdict, str | None]:
    passes = len(a.passes)
    seen = f"{len(stages)} tensors of {passes} pass{'' if passes == 1 else 'es'}"
    different = stages[~stages["equal"]]
    if different.empty:
        evidence = [f"{seen} are the same in every bit"]
        bad = stages[~stages["finite_a"]]
        if len(bad):
            evidence.append(f"both hold values that are not finite, first at {bad.iloc[0]['tap']}")
        return Verdict(SAME, evidence=tuple(evidence)), None
    apart = different[different["error"] > 0]
    if apart.empty:
        sentence = f"{seen} hold the same values, {len(different)} of them in another form"
        return Verdict(ROUNDING, evidence=(sentence,)), None
    first = apart.iloc[0]
    evidence = [
        f"{len(different)} of {seen} differ, first {first['tap']} in pass {first['step']}, by {_error(first)}",
    ]
    if faults.empty:
        worst = different.loc[different["error"].idxmax()]
        evidence.append(f"the largest error is {_error(worst)}, at {worst['tap']} in pass {worst['step']}")
        if summary["judged"]:
            evidence.append(
                f"all {len(a.judged)} tensors of side a and {len(b.judged)} of side b that can be judged are what "
                "float64 makes of their own inputs: what differs is inherited rounding"
            )
            if summary["unjudged"]:
                evidence.append(
                    f"{summary['unjudged']} more, whose inputs a side does not show, are at most {GROWTH:g} times as "
                    "far apart as what comes before them"
                )
        else:
            evidence.append(f"no op adds more than {GROWTH:g} times the error of what it is made from")
        evidence += _outputs(summary)
        confidence = "established" if summary["judged"] and not summary["unjudged"] else "likely"
        return Verdict(ROUNDING, evidence=tuple(evidence), confidence=confidence), None
    row = faults.iloc[0]
    here = faults[(faults["step"] == row["step"]) & (faults["tap"] == row["tap"])]
    both = {"a", "b"} <= set(here["side"])
    side = ("both" if both else row["side"]) or None
    labels = {"a": a.label, "b": b.label}
    if side is None:
        where = Where(None if pd.isna(row["layer"]) else int(row["layer"]), row["op"], row["tap"])
        evidence.append(
            f"at {row['tap']} the error grows to {row['error']:.3g}, far beyond that of what it is made from"
        )
    else:
        where = place(pd.Series({**row, "index": row["index"] or ()})) if row["index"] else Where(
            None if pd.isna(row["layer"]) else int(row["layer"]), row["op"], row["tap"]
        )  # fmt: skip
        who = "both sides depart" if both else f"side {side} ({labels[side]}) departs"
        how = (
            f"is off by {row['error']:.3g}, where its roundings explain {row['limit']:.3g}"
            if math.isfinite(row["error"])
            else "is not finite"
        )
        evidence.append(f"{who} from float64 of its own inputs at {row['tap']} in pass {row['step']}: it {how}")
        if row["index"]:
            evidence.append(
                f"at index {tuple(row['index'])} it is {row['found']:.6g}, where its inputs give {row['expected']:.6g}"
            )
    others = faults[(faults["step"] != row["step"]) | (faults["tap"] != row["tap"])]
    if len(others):
        ops = ", ".join(dict.fromkeys(others["op"]))
        evidence.append(f"{len(others)} more tensors are wrong beside their own inputs: {ops}")
    evidence += _outputs(summary)
    before = _index(stages, row)
    ruled_out = [f"the {before} tensors before it that both show follow from their inputs on both sides"]
    return Verdict(
        f"{DIFFERENT} at {row['op']}", where, NOT_ESTABLISHED, tuple(evidence), tuple(ruled_out), None, NOT_ESTABLISHED
    ), side  # fmt: skip


def _index(stages: pd.DataFrame, row: pd.Series) -> int:
    """How many rows of `stages` come before the tap point of a fault, which one side may lack."""
    here = stages[stages["step"] == row["step"]]
    names = order_of(list(dict.fromkeys([*here["tap"], row["tap"]])))
    before = set(names[: names.index(row["tap"])])
    return int((stages["step"] < row["step"]).sum()) + int(here["tap"].isin(before).sum())


def _error(row: pd.Series) -> str:
    if not math.isfinite(row["error"]):
        return "values that are not finite on one side"
    return f"{row['error']:.3g} ({row['roundings']:.3g} roundings of {row['rounding']})"


def _outputs(summary: Mapping[str, Any]) -> list[str]:
    """Sentences on the routers and the logits."""
    sentences = []
    routing, logits = summary["routing"], summary["logit_summary"]
    if routing is not None and routing["choices"]:
        sentences.append(
            f"other experts in {routing['flips']} of {routing['choices']} choices of a token in a layer, and in "
            f"{routing['near_ties']} more by a margin below 1e-5"
        )
    if logits["kl_mean"] is not None:
        sentences.append(
            f"logits: max |b - a| / max |a| {logits['parity']:.3g}, KL {logits['kl_mean']:.3g} nats on average and "
            f"{logits['kl_max']:.3g} at most, another likeliest token at {logits['top1_flips']} of "
            f"{logits['positions']} positions"
        )
    if logits["not_finite"]:
        sentences.append(
            f"logits of {logits['not_finite']} of {logits['positions']} positions are not finite on one side or both"
        )
    return sentences
