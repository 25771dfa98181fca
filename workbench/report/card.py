"""The page of one rehearsal: verdict and changes first, then ops, products, float16, memory, times, the card itself."""

from __future__ import annotations

import html
import math
import re

import pandas as pd

from workbench import __version__
from workbench.analysis.rehearse import Change, Rehearsal
from workbench.analysis.wording import duration_text, size_text
from workbench.cards import Card
from workbench.plots.cards import memory_bar, time_shares
from workbench.plots.half_precision import half_precision_depth
from workbench.report.display import Html, Shown, folded, note, stack, table, verdict_card
from workbench.report.page import whole_page

#: Columns of the tables: name in the report -> heading.
OP_HEADINGS = {
    "what": "op", "on_card": "on the card", "backend": "here", "calls": "calls", "dtype": "dtype", "why": "why",
}  # fmt: skip
NAMED_HEADINGS = {"op": "op", "backend": "backend", "can": "can run", "reason": "how, or why not"}
PRODUCT_HEADINGS = {
    "op": "op", "primitive": "product", "dtype": "dtype", "outcome": "outcome", "library": "asked first",
    "to": "went to", "calls": "calls", "factor": "times longer", "overflowed": "overflow", "flushed": "flush",
}  # fmt: skip
COST_HEADINGS = {
    "part": "part", "op": "op", "dtype": "dtype", "gflops": "Gflop", "mbytes": "MB", "time": "least time",
    "share": "share, %", "bound": "bound by", "factor": "times longer",
}  # fmt: skip
ACTIVATION_HEADINGS = {
    "name": "tensor", "held": "held in", "absmax": "largest", "percent": "% of 65504", "token": "token",
    "overflows": "overflow", "flushes": "flush", "values": "of values",
}  # fmt: skip
WEIGHT_HEADINGS = {
    "tensor": "tensor", "values": "values", "absmax": "largest", "overflows": "overflow", "flushes": "flush",
}  # fmt: skip
REMEDY_HEADINGS = {
    "remedy": "remedy", "serves": "serves", "same_experts": "logits off", "weights_overflow": "weights over",
    "values_bad": "values bad", "extra_bytes": "bytes more", "wide_flops": "flops a token in float32",
}  # fmt: skip
PLAN_HEADINGS = {"what": "part", "size": "size", "how": "what it is"}
#: How an attestation says that nobody named the backend (`kernels.registry`).
ORDER = r"first of the automatic order for \d+ tokens on \w+ that can serve"
#: Rows of a table that are shown.
ROWS = 10


def card_findings(report: Rehearsal) -> dict:
    """Title, verdict and numbers in the form of a notebook's findings, for the index of a folder of reports."""
    return {
        "title": title(report), "verdict": _findings(report),
        "numbers": [{"label": a, "value": b, "note": c} for a, b, c in _numbers(report)],
        "fault_found": report.verdict.is_fault, "card": report.to_json(),
    }  # fmt: skip


def title(report: Rehearsal) -> str:
    name = report.checkpoint.rstrip("/").rpartition("/")[2] or report.checkpoint
    return f"{name} on {report.card.title}"


def card_view(report: Rehearsal) -> Html:
    """Everything that a rehearsal found, for a notebook or a page."""
    parts: list[Shown] = [verdict_card(report.verdict)]
    sections = (
        ("What to change, and what that costs", _changes(report)), ("What runs for each op", _ops(report)),
        ("Products under the card's rules", _products(report)), ("Where float16 overflows", _readiness(report)),
        ("Memory", _memory(report)), ("Least time of a pass", _costs(report)), ("The card", _card(report.card)),
    )  # fmt: skip
    for heading, shown in sections:
        parts += [Html(f"<h2>{html.escape(heading)}</h2>", f"\n{heading}"), shown]
    return stack(*parts)


def _changes(report: Rehearsal) -> Shown:
    if not report.changes:
        return note("Nothing: it runs there as it is.")
    return stack(*map(_change, report.changes))


def _change(change: Change) -> Html:
    what = f"{change.what[:1].upper()}{change.what[1:]}"
    rows = "".join(
        f"<dt>{label}</dt><dd>{html.escape(text)}</dd>" for label, text in (("Why", change.why), ("Cost", change.cost))
    )
    kind = "fault" if change.must else "fine"
    page = f'<section class="verdict {kind}"><p><strong>{html.escape(what)}</strong></p><dl>{rows}</dl></section>'
    return Html(page, f"{what}\n  why: {change.why}\n  cost: {change.cost}")


def _ops(report: Rehearsal) -> Shown:
    if report.ops.empty:
        return note("No op ran.")
    rows = report.ops.assign(why=[
        f"{row.why}; refused: {row.refused}" if row.refused else row.why for row in report.ops.itertuples()
    ])  # fmt: skip
    same = ["op", "on_card", "backend", "dtype"]
    merged = rows.groupby(same, sort=False).agg(tokens=("tokens", _phases), calls=("calls", "sum"), why=("why", "last"))
    merged = merged.reset_index()
    merged["what"] = [row.op + row.tokens for row in merged.itertuples()]
    merged["why"] = [re.sub(ORDER, "first in order that can serve", text) for text in merged["why"]]
    merged["backend"] = ["the same" if row.backend == row.on_card else row.backend for row in merged.itertuples()]
    caption = (
        f"The run of {report.tokens:,} tokens and one more. “On the card” is what comes first there: a library by the "
        "card's rules, or a backend that this machine alone cannot run; “here” is what stood in for it."
    )
    if report.ended is not None:
        caption += f" The run ended in {report.ended}: ops that come after it are not here."
    parts: list[Shown] = [table(merged[list(OP_HEADINGS)], caption, OP_HEADINGS)]
    if len(report.named):
        libraries = report.named.assign(reason=[
            f"where it is installed there: --backend {row.op}={row.backend}" if row.can else row.reason
            for row in report.named.itertuples()
        ])[list(NAMED_HEADINGS)]  # fmt: skip
        can = int(report.named["can"].sum())
        caption = f"{can} of {len(libraries)} backends of libraries are within the card's limits; they run where named."
        shown = table(libraries, caption, NAMED_HEADINGS)
        parts.append(folded("Libraries, which run only where they are named", shown))
    return stack(*parts)


def _phases(tokens: pd.Series) -> str:
    """What tells the rows of one op apart: nothing where both phases are served alike."""
    if len(set(tokens)) > 1:
        return ""
    return ", one token" if tokens.iloc[0] == "1" else ", prompt"


def _products(report: Rehearsal) -> Shown:
    products = report.products
    if products.empty:
        return note("No product was computed.")
    moved = products[products["outcome"] != "run"]
    lost = int(products["overflowed"].sum() + products["flushed"].sum())
    caption = (
        f"{int(moved['calls'].sum()):,} of {int(products['calls'].sum()):,} products do not run where they would be "
        f"asked first; {lost:,} results were lost by rounding, to infinity or to zero. “Times longer” is against "
        f"{report.card.model_dtype}, by the card's peak rates."
    )
    why = [f"{row.dtype} of {row.op}: {row.why}" for row in moved.drop_duplicates(["op", "dtype"]).itertuples()]
    shown = table(products[list(PRODUCT_HEADINGS)].replace({"to": {"": "–"}}), caption, PRODUCT_HEADINGS)
    return stack(shown, *(note(f"{sentence[:1].upper()}{sentence[1:]}.") for sentence in why))


def _readiness(report: Rehearsal) -> Shown:
    ready = report.readiness
    if ready is None:
        reason = (
            "Nothing was run." if not report.tokens else
            f"The card runs models in {report.card.model_dtype}: nothing is narrowed to float16."
            if report.card.model_dtype != "float16" else
            "The checkpoint is stored in float16 already: what overflowed, did so before."
            if report.stored == "float16" else "Left out on request."
        )  # fmt: skip
        return note(reason)
    held = ready.activations[ready.activations["held"] == "float16"]
    held = held.sort_values("absmax", ascending=False, kind="stable").head(ROWS)
    rows = held.assign(percent=100.0 * held["share"])[list(ACTIVATION_HEADINGS)]
    is_told = ready.verdict.is_fault and report.verdict.cause_id == ready.verdict.cause_id
    said = verdict_card(ready.verdict)
    if is_told:
        said = note("The verdict above says where and why, and what sets it right.")
    parts: list[Shown] = [
        said, half_precision_depth(ready.activations),
        table(rows, "Tensors held in float16 that come nearest to its largest number or pass it.", ACTIVATION_HEADINGS),
    ]  # fmt: skip
    changed = ready.weights[(ready.weights["overflows"] > 0) | (ready.weights["flushes"] > 0)]
    if len(changed):
        caption = f"{len(changed)} of {len(ready.weights)} weights lose values."
        lost = table(changed[list(WEIGHT_HEADINGS)].head(ROWS), caption, WEIGHT_HEADINGS)
        parts.append(folded("Weights that lose values on load", lost))
    if len(ready.remedies) > 1:
        rows = ready.remedies[list(REMEDY_HEADINGS)].astype(object)
        rows = rows.map(lambda value: "not finite" if isinstance(value, float) and math.isinf(value) else value)
        parts.append(table(rows, "Remedies, each with its rerun in float16.", REMEDY_HEADINGS))
    return stack(*parts)


def _memory(report: Rehearsal) -> Shown:
    plan = report.plan
    unknown = "unknown"
    rows = [
        ("weights", size_text(plan.weights), f"all tensors in {plan.dtype}, exact from the files"),
        ("a pass", size_text(plan.working), f"estimate for {plan.prompt:,} tokens at once"),
        ("one sequence", size_text(plan.sequence), "recurrent states in float32 and convolution windows, any length"),
        ("one token", size_text(plan.token), "keys and values of all layers of full attention"),
        ("asked for", size_text(plan.needed), f"{plan.sequences:,} of {plan.length:,} tokens, all of the above"),
        ("the card", unknown if plan.capacity is None else size_text(plan.capacity),
         unknown if plan.usable is None else f"{size_text(plan.usable)} of it planned for ({plan.utilisation:.0%})"),
        ("longest context", unknown if plan.longest is None else f"{plan.longest:,} tokens",
         f"of one sequence; the model was made for {plan.limit:,}"),
        ("most sequences", unknown if plan.most_sequences is None else f"{plan.most_sequences:,}",
         f"of {plan.length:,} tokens each"),
    ]  # fmt: skip
    frame = pd.DataFrame(rows, columns=["what", "size", "how"])
    return stack(memory_bar(plan), table(frame, "What takes how much, exact but for the pass.", PLAN_HEADINGS))


def _costs(report: Rehearsal) -> Shown:
    parts: list[Shown] = []
    for phase, (ran, model_dtype) in report.seconds.items():
        if ran is None:
            continue
        sentence = f"{phase}: at least {duration_text(ran)}"
        if model_dtype is not None and ran > model_dtype:
            sentence += f", {duration_text(model_dtype)} if all of it ran in {report.card.model_dtype}"
        parts.append(note(f"{sentence[:1].upper()}{sentence[1:]}."))
    if report.costs["seconds"].isna().any():
        missing = dict.fromkeys(report.costs.loc[report.costs["seconds"].isna(), "bound"])
        parts.append(note(f"Times cannot be given: {'; '.join(missing)}."))
    else:
        parts.insert(0, time_shares(report.costs))
    for phase, rows in report.costs.groupby("phase", sort=False):
        shown = rows.assign(
            gflops=rows["flops"] / 1e9, mbytes=rows["bytes"] / 1e6, share=100.0 * rows["share"],
            time=["unknown" if s != s else duration_text(s) for s in rows["seconds"]],
        )[list(COST_HEADINGS)]  # fmt: skip
        caption = "Flops and bytes of all layers; the time is the larger of flops / rate and bytes / bandwidth."
        parts.append(folded(f"{phase[:1].upper()}{phase[1:]}", table(shown, caption, COST_HEADINGS)))
    return stack(*parts)


def _card(card: Card) -> Shown:
    rows = []
    for figure, source in card.sources.items():
        rows.append((figure, _figure(card, figure), source))
    rows += [(figure, "unknown", reason) for figure, reason in card.unknown.items()]
    parts: list[Shown] = [table(pd.DataFrame(rows, columns=["figure", "value", "source"]),
                                "What the profile states, and who says so.")]  # fmt: skip
    if card.absent_primitives:
        missing = pd.DataFrame(
            [(p.library, p.name.removeprefix("aten::"), p.error) for p in card.absent_primitives.values()],
            columns=["library", "operator", "what it says there"],
        )
        caption = f"{len(missing)} operators of torch that raise on the card, and here during the rehearsal."
        parts.append(folded("Operators that raise there", table(missing, caption)))
    if card.absent_modules:
        modules = pd.DataFrame(list(card.absent_modules.items()), columns=["module", "why"])
        parts.append(folded("Modules that are not there", table(modules, f"{len(modules)} modules.")))
    return stack(*parts, *map(note, card.notes))


def _figure(card: Card, figure: str) -> str:
    if figure == "capability":
        return ".".join(map(str, card.capability))
    if figure == "memory_bytes":
        return size_text(card.memory_bytes)
    if figure.endswith("bandwidth"):
        value = card.measured_bandwidth if figure.startswith("measured.") else card.bandwidth
        return f"{value / 1e9:,.0f} GB/s"
    rates = card.measured_rates if figure.startswith("measured.") else card.rates
    return f"{rates[figure.rpartition('.')[2]] / 1e12:.4g} Tflop/s"


def _findings(report: Rehearsal) -> list[str]:
    """The sentences at the head of the page: the verdict, then what must be changed."""
    must = [f"{c.what[:1].upper()}{c.what[1:]}." for c in report.changes if c.must]
    return [f"{report.verdict.verdict}.", *must[:3]]


def _numbers(report: Rehearsal) -> list[tuple[str, str, str]]:
    plan, boxes = report.plan, []
    if plan.usable is None:
        boxes.append(("Memory needed", size_text(plan.needed), "that of the card is unknown"))
    else:
        boxes.append(("Memory needed", size_text(plan.needed), f"of {size_text(plan.usable)} that can be used"))
    if report.readiness is not None:
        held = report.readiness.activations
        held = held[held["held"] == "float16"]
        if len(held):
            row = held.loc[held["absmax"].idxmax()]
            boxes.append(("Nearest to 65504", f"{100.0 * row['share']:.3g} %", f"{row['name']}, of float16's range"))
    if report.accuracy is not None and report.accuracy["card"] is not None:
        off, stored = report.accuracy["card"], report.accuracy["as_stored"]
        shown = f"{off:.2g}" if math.isfinite(off) else "not finite"
        boxes.append(("Logits off float32's", shown, f"of the largest; {stored:.2g} as stored"))
    times = list(report.seconds.items())
    if times and times[-1][1][0] is not None:
        phase, (seconds, _) = times[-1]
        boxes.append(("Tokens a second, at most", f"{1.0 / seconds:,.0f}", f"{phase}, one sequence, by peak figures"))
    if len(report.products) and len(boxes) < 4:  # a row of the page
        moved = report.products[report.products["outcome"] != "run"]
        boxes.append(("Products routed or cast", f"{int(moved['calls'].sum()):,}",
                      f"of {int(report.products['calls'].sum()):,} in this run"))  # fmt: skip
    return boxes


def card_page(report: Rehearsal, command: str, home: str | None = None) -> str:
    """One HTML file that holds everything it shows; `home` is the page of all reports that it lies beside."""
    heading = title(report)
    entries = {
        "Command": command, "Checkpoint": report.checkpoint, "Card": f"{report.card.name}: {report.card.title}",
        "Dtype": f"{report.dtype}; the files hold {report.stored}",
        "Prompt": f"{report.tokens:,} tokens and one more" if report.tokens else "none, nothing was run",
        "Took": f"{report.elapsed:.0f} s on this machine", "Workbench": __version__,
    }  # fmt: skip
    kicker = "Rehearsal of a card"
    if home is not None:
        kicker = f'<a href="{html.escape(home)}">All reports</a> / {kicker}'
    return whole_page(
        heading, kicker=kicker, findings=map(html.escape, _findings(report)), boxes=_numbers(report),
        body=card_view(report).page, entries=entries,
    )  # fmt: skip
