"""Modules that stand in for libraries and cards that are not at hand: true names and signatures, right results."""
