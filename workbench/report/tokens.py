"""Text in which each token shows its expert: readable, and told by number and underline as well as by colour."""

from __future__ import annotations

import html
from collections import Counter

from workbench.analysis.routing.views import TextView
from workbench.report.display import Html

#: Background and underline of the experts that are strongest most often; every other one is plain with its number.
MARKS = (
    ("#bcdcf2", "solid"), ("#fbe0a8", "dashed"), ("#b9e4d3", "dotted"), ("#f6c8ad", "double"), ("#ecd0e0", "wavy"),
    ("#d8eefb", "dashed"), ("#e4e0b8", "solid"), ("#d9dde3", "dotted"),
)  # fmt: skip
INK = "#1f2933"

#: A reader's own style cannot be counted on in a notebook, so the text brings what it needs.
STYLE = f"""<style>
.routed {{ background: #fff; color: {INK}; border: 1px solid #d7dce2; border-radius: .5rem; padding: .6rem .9rem;
  line-height: 1.9; white-space: pre-wrap; overflow-wrap: anywhere; }}
.routed span, .routed-key .mark {{ color: {INK}; border-radius: .2rem; padding: .1em .05em;
  text-decoration-line: underline; text-decoration-thickness: 2px; text-underline-offset: .22em; }}
.routed sup {{ font-size: .62em; line-height: 0; color: #52606d; user-select: none; }}
.routed i {{ color: #6b7280; font-style: normal; }}
.routed .plain {{ text-decoration: none; }}
.routed-key {{ display: flex; flex-wrap: wrap; gap: .2rem 1rem; margin: .4rem 0; font-size: .9rem; }}
</style>"""

#: Keeps a number on the line of its token.
JOINER = "&#8288;"

#: For letters that cannot be seen, and for a token that completes none.
VISIBLE = {"\n": "<i>↵</i>\n", "\t": "<i>→</i>\t", "": "<i>·</i>"}


def routed_text(view: TextView, experts: int, name: str = "") -> Html:
    """The tokens of `views.text_view`, each with the number of its strongest expert; a pointer on it names all.

    Tokens whose router gave no finite probabilities say so. `name` is put before the caption.
    """
    first = [chosen[0] for chosen in view.experts]
    counts = Counter(expert for expert in first if expert >= 0)
    common = [expert for expert, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[: len(MARKS)]]
    style = {expert: MARKS[place] for place, expert in enumerate(common)}
    body = "".join(
        _token(piece, chosen, weights, style)
        for piece, chosen, weights in zip(view.pieces, view.experts, view.weights, strict=True)
    )
    key = "".join(
        f'<span><span class="mark" style="{_css(style[expert])}">&nbsp;expert {expert}&nbsp;</span> '
        f"{counts[expert]} of {len(first)}</span>"
        for expert in common
    )
    rest = sum(counts.values()) - sum(counts[expert] for expert in common)
    if rest:
        key += f'<span>others, by number: {rest} of {len(first)}</span>'
    caption = _caption(view, counts, common, experts, name)
    page = (
        f'{STYLE}<figure class="data"><div class="routed-key">{key}</div><div class="routed">{body}</div>'
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
    )
    return Html(page, caption)


def _token(piece: str, experts: tuple[int, ...], weights: tuple[float, ...], style: dict[int, tuple[str, str]]) -> str:
    strongest = experts[0]
    whole = "".join(VISIBLE.get(letter, html.escape(letter)) for letter in piece) if piece else VISIBLE[""]
    text = whole.rstrip("\n")
    breaks = whole[len(text) :]  # after the number, or it would stand on the next line
    if strongest < 0:
        return f'<span class="plain" title="no finite probabilities">{text}{JOINER}<sup>✗</sup></span>{breaks}'
    title = ", ".join(f"{expert}: {weight:.2f}" for expert, weight in zip(experts, weights, strict=True))
    look = f'style="{_css(style[strongest])}"' if strongest in style else 'class="plain"'
    return f'<span {look} title="experts {title}">{text}{JOINER}<sup>{strongest}</sup></span>{breaks}'


def _css(mark: tuple[str, str]) -> str:
    color, line = mark
    return f"background:{color};text-decoration-style:{line}"


def _caption(view: TextView, counts: Counter[int], common: list[int], experts: int, name: str) -> str:
    if not common:
        return f"{name}Layer {view.layer}: no token has finite probabilities."
    total = sum(counts.values())
    repeats = [
        (piece.strip(), chosen[0])
        for piece, chosen in zip(view.pieces, view.experts, strict=True)
        if len(piece.strip()) > 1
    ]
    seen = Counter(word for word, _ in repeats)
    again = [(word, expert) for word, expert in repeats if seen[word] > 1]
    usual = Counter(again)
    steady = sum(max(count for (w, _), count in usual.items() if w == word) for word in {word for word, _ in again})
    words = "" if not again else (
        f" A piece that comes back goes to its most usual expert {100 * steady / len(again):.0f} % of the time."
    )
    return (
        f"{name}Layer {view.layer}: {len(counts)} of {experts} experts are the strongest for some token; expert "
        f"{common[0]} for {100 * counts[common[0]] / total:.0f} % of {total}.{words} The small number is the strongest "
        "expert; a pointer on a token names all with their weights."
    )
