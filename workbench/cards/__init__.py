"""Profiles of cards: what an accelerator can do, lacks and costs, read from `data/cards/*.toml`."""

from workbench.cards.profile import AbsentPrimitive, Card, Rule
from workbench.cards.read import card_named, known_cards, read_card

__all__ = ["AbsentPrimitive", "Card", "Rule", "card_named", "known_cards", "read_card"]
