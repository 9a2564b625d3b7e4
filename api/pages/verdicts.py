"""A verdict as a badge: a word, its colour, and sentences."""

from collections.abc import Sequence
from dataclasses import dataclass

from optigpu.report.notes import REASONS, WARNINGS


@dataclass(frozen=True)
class Badge:
    """`kind` is good, warn, bad or plain."""

    kind: str
    word: str
    meanings: tuple[str, ...] = ()


def badge(reasons: Sequence[str], warnings: Sequence[str]) -> Badge:
    """Of a result: not valid for these reasons, or valid with these warnings."""
    if reasons:
        return Badge("bad", "invalid", tuple(_sentence(REASONS.get(each, each)) for each in reasons))
    if warnings:
        word = "1 warning" if len(warnings) == 1 else f"{len(warnings)} warnings"
        return Badge("warn", word, tuple(_sentence(WARNINGS.get(each, each)) for each in warnings))
    return Badge("good", "valid")


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}."
