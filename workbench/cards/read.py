"""Reads a profile. A key that is not known, a figure without a source and a rule that leads nowhere are errors."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from workbench.cards.profile import DTYPES, FIGURES, MATMUL, OPS, OUTCOMES, AbsentPrimitive, Card, Rule
from workbench.errors import InputError

#: Profiles of this repository.
FOLDER = Path(__file__).resolve().parents[2] / "data" / "cards"

KEYS = (
    "title", "device", "capability", "memory_bytes", "bandwidth", "rates", "measured", "native_matmul", "model_dtype",
    "absent_modules", "absent_primitives", "rules", "notes", "sources", "unknown",
)  # fmt: skip
DEVICES = ("cuda", "cpu")


def known_cards() -> tuple[str, ...]:
    """Names of the repository's profiles; empty where the package is installed without it."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


def card_named(name: str | Path) -> Card:
    """The card of a name in `known_cards`, or of the path of a ``.toml`` file.

    Raises InputError, one line with file and key, for a name that is not known and a profile that cannot be used.
    """
    path = Path(name)
    if path.suffix == ".toml":
        return read_card(path)
    if str(name) not in known_cards():
        known = ", ".join(known_cards())
        expected = f"one of {known}, or the path of a .toml file" if known else "the path of a .toml file"
        where = "" if known else f" (the package was installed without {FOLDER.parent.name}/{FOLDER.name})"
        raise InputError(f"card {str(name)!r}: expected {expected}{where}")
    return read_card(FOLDER / f"{name}.toml")


def read_card(path: Path) -> Card:
    """The profile in a file; its name is the file's. Raises InputError as `card_named` does."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # editors on Windows put a mark first
    except OSError as error:
        raise InputError(f"card {path}: cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"card {path}: expected TOML, found: {error}") from None
    return _Reader(path, content).card()


class _Reader:
    """One file; every error begins with its path and the key."""

    def __init__(self, path: Path, content: dict[str, Any]):
        self.path, self.content = path, content

    def wrong(self, key: str, expected: str, found: object) -> InputError:
        return InputError(f"card {self.path}: {key}: expected {expected}, found {str(found)[:80]}")

    def known_keys(self, table: Mapping[str, Any], allowed: tuple[str, ...], where: str = "") -> None:
        for key in table:
            if key not in allowed:
                raise self.wrong(f"{where}{key}", f"one of the keys {', '.join(allowed)}", "an unknown key")

    def take(
        self, table: Mapping[str, Any], key: str, where: str, is_right: Callable[[Any], bool], expected: str
    ) -> Any:
        """A value that has to be there."""
        if key not in table:
            raise self.wrong(where + key, expected, "nothing")
        if not is_right(table[key]):
            raise self.wrong(where + key, expected, repr(table[key]))
        return table[key]

    def text(self, table: Mapping[str, Any], key: str, where: str = "", among: tuple[str, ...] | None = None) -> str:
        expected = "some text" if among is None else f"one of {', '.join(among)}"
        right = lambda v: isinstance(v, str) and v.strip() != "" and (among is None or v in among)  # noqa: E731
        return self.take(table, key, where, right, expected)

    def texts(
        self, table: Mapping[str, Any], key: str, where: str = "", among: tuple[str, ...] | None = None
    ) -> tuple[str, ...]:
        expected = "a list of texts" if among is None else f"a list of {', '.join(among)}"

        def right(value: Any) -> bool:
            return isinstance(value, list) and all(isinstance(x, str) and (among is None or x in among) for x in value)

        return tuple(self.take(table, key, where, right, expected))

    def number(self, table: Mapping[str, Any], key: str, where: str = "") -> float | None:
        """A positive figure, None where it is left out."""
        if key not in table:
            return None
        right = lambda v: type(v) in (int, float) and 0 < v < float("inf")  # noqa: E731
        return self.take(table, key, where, right, "a number above 0")

    def table(self, key: str) -> dict[str, Any]:
        value = self.content.get(key, {})
        if not isinstance(value, dict):
            raise self.wrong(key, "a table", type(value).__name__)
        return value

    def tables(self, key: str) -> list[dict[str, Any]]:
        value = self.content.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self.wrong(key, f"tables, each headed [[{key}]]", type(value).__name__)
        return value

    def text_table(self, key: str) -> dict[str, str]:
        table = self.table(key)
        return {name: self.text(table, name, f"{key}.") for name in table}

    def card(self) -> Card:
        top = self.content
        self.known_keys(top, KEYS)
        measured = self.table("measured")
        self.known_keys(measured, ("bandwidth", "rates"), "measured.")
        memory = self.number(top, "memory_bytes")
        if memory is not None and memory != int(memory):
            raise self.wrong("memory_bytes", "a whole number of bytes", memory)
        card = Card(
            name=self.path.stem, title=self.text(top, "title"), device=self.text(top, "device", among=DEVICES),
            model_dtype=self.text(top, "model_dtype", among=DTYPES),
            native_matmul=self.texts(top, "native_matmul", among=DTYPES), capability=self.capability(),
            memory_bytes=None if memory is None else int(memory), bandwidth=self.number(top, "bandwidth"),
            rates=self.rates(self.table("rates"), "rates."),
            measured_bandwidth=self.number(measured, "bandwidth", "measured."),
            measured_rates=self.rates(measured.get("rates", {}), "measured.rates."),
            absent_modules=self.text_table("absent_modules"), absent_primitives=self.absent_primitives(),
            rules=tuple(self.rule(i, table) for i, table in enumerate(self.tables("rules"))),
            notes=self.texts(top, "notes") if "notes" in top else (), sources=self.text_table("sources"),
            unknown=self.text_table("unknown"),
        )  # fmt: skip
        self.check_sources(card)
        self.check_products(card)
        self.check_routes(card)
        return card

    def capability(self) -> tuple[int, int] | None:
        if "capability" not in self.content:
            return None
        if self.content["device"] == "cpu":
            raise self.wrong("capability", 'nothing beside device = "cpu"', repr(self.content["capability"]))
        right = lambda v: isinstance(v, list) and len(v) == 2 and all(type(x) is int and x >= 0 for x in v)  # noqa: E731
        major, minor = self.take(self.content, "capability", "", right, "two whole numbers, [major, minor]")
        return major, minor

    def rates(self, table: Any, where: str) -> dict[str, float]:
        if not isinstance(table, dict):
            raise self.wrong(where.rstrip("."), "a table", type(table).__name__)
        self.known_keys(table, DTYPES, where)
        return {name: float(self.number(table, name, where)) for name in table}

    def absent_primitives(self) -> dict[str, AbsentPrimitive]:
        found: dict[str, AbsentPrimitive] = {}
        for i, table in enumerate(self.tables("absent_primitives")):
            where = f"absent_primitives[{i}]."
            self.known_keys(table, ("names", "library", "error", "instead"), where)
            library, error, instead = (self.text(table, key, where) for key in ("library", "error", "instead"))
            names = self.texts(table, "names", where)
            if not names:
                raise self.wrong(f"{where}names", "at least one operator of torch, aten::NAME", "none")
            for name in names:
                self.check_operator(name, f"{where}names")
                if name in found:
                    raise self.wrong(f"{where}names", "every operator once", f"{name} a second time")
                found[name] = AbsentPrimitive(name=name, library=library, error=error, instead=instead)
        return found

    def check_operator(self, name: str, where: str) -> None:
        """A name that torch never calls would be no limit at all."""
        import torch  # only profiles that lack something need it

        prefix, _, short = name.partition("::")
        if prefix != "aten" or not short:
            raise self.wrong(where, "operators of torch, aten::NAME", repr(name))
        overloads = [full for full in torch._C._dispatch_get_all_op_names() if full.partition(".")[0] == name]
        if not overloads:
            hint = "without overload" if "." in short else f"that torch {torch.__version__} has"
            raise self.wrong(where, f"operators of torch, aten::NAME, {hint}", repr(name))
        composite = "CompositeImplicitAutograd"  # torch takes such a one apart before anybody sees it
        if all(torch._C._dispatch_has_kernel_for_dispatch_key(full, composite) for full in overloads):
            raise self.wrong(where, "operators that torch does not make of others; name those", repr(name))

    def rule(self, i: int, table: dict[str, Any]) -> Rule:
        where = f"rules[{i}]."
        self.known_keys(table, ("op", "library", "dtypes", "outcome", "to", "why", "price", "source"), where)
        outcome = self.text(table, "outcome", where, OUTCOMES)
        dtypes = self.texts(table, "dtypes", where, DTYPES)
        to = None
        if outcome != "run":
            to = self.text(table, "to", where, DTYPES if outcome == "cast" else None)
        elif "to" in table:
            raise self.wrong(f"{where}to", 'nothing beside outcome = "run"', repr(table["to"]))
        if not dtypes or to in dtypes:
            raise self.wrong(f"{where}dtypes", "at least one, and none that is cast to itself", list(dtypes))
        return Rule(
            op=self.text(table, "op", where, OPS), library=self.text(table, "library", where), dtypes=dtypes,
            outcome=outcome, to=to, why=self.text(table, "why", where), price=self.number(table, "price", where),
            source=self.text(table, "source", where),
        )  # fmt: skip

    def check_sources(self, card: Card) -> None:
        """Every figure has a source or is declared unknown, and neither table speaks of anything else."""
        figures = (*FIGURES, *(("capability",) if card.device == "cuda" else ()))
        measured = [f"measured.rates.{name}" for name in card.measured_rates]
        measured += ["measured.bandwidth"] if card.measured_bandwidth is not None else []
        for key in (*card.sources, *card.unknown):
            if key not in (*figures, *measured, "capability"):
                table = "sources" if key in card.sources else "unknown"
                known = ", ".join((*figures, *measured))
                raise self.wrong(f"{table}.{key}", f"one of the figures {known}", "another name")
        for figure in (*figures, *measured):
            part, _, name = figure.partition(".")
            is_given = name in card.rates if part == "rates" else part == "measured" or getattr(card, part) is not None
            if is_given and figure in card.unknown:
                raise self.wrong(f"unknown.{figure}", "nothing beside the figure itself", "both")
            if is_given and figure not in card.sources:
                raise self.wrong(f"sources.{figure}", "who states the figure", "nothing")
            if not is_given and figure not in card.unknown:
                raise self.wrong(figure, f"a figure, or unknown.{figure} with the reason", "neither")
            if not is_given and figure in card.sources:
                raise self.wrong(f"sources.{figure}", "nothing where the figure is unknown", "a source")

    def check_products(self, card: Card) -> None:
        """The dtype of models can be multiplied, and so can what a rule casts to."""

        def is_multiplied(op: str, dtype: str) -> bool:
            rules = (card.rule(op, dtype), card.rule(MATMUL, dtype))
            known = next((rule for rule in rules if rule is not None), None)
            return dtype in card.native_matmul if known is None else known.outcome != "cast"

        if card.model_dtype not in card.native_matmul and card.rule(MATMUL, card.model_dtype) is None:
            expected = f"a dtype of native_matmul, or one with a rule for {MATMUL}"
            raise self.wrong("model_dtype", expected, repr(card.model_dtype))
        for i, rule in enumerate(card.rules):
            if rule.outcome == "cast" and not is_multiplied(rule.op, rule.to):
                expected = "a dtype of native_matmul, or one with a rule to run or route it"
                raise self.wrong(f"rules[{i}].to", expected, repr(rule.to))

    def check_routes(self, card: Card) -> None:
        """A route ends where something runs: no rule may send the same call on again."""
        for i, rule in enumerate(card.rules):
            for dtype in rule.dtypes if rule.outcome == "route" else ():
                onward = card.rule(rule.op, dtype, rule.to)
                if onward is not None and onward.outcome != "run":
                    raise self.wrong(
                        f"rules[{i}].to", f"a library that runs {rule.op} in {dtype}",
                        f"{rule.to}, which has a rule to {onward.outcome} it",
                    )  # fmt: skip
