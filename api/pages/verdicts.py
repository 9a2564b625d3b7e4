"""A verdict as a badge: a word, its colour, and sentences."""

from collections.abc import Sequence
from dataclasses import dataclass

from optigpu.report.rows import REASONS, WARNINGS
from optigpu.vocabulary import Document


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


def sentences(verdict: Document) -> tuple[str, ...]:
    """The verdict in words: what it is, then each reason and warning with what was noted about it."""
    names = [*verdict["reasons"], *verdict["warnings"]]
    notes = list(verdict.get("notes", ()))
    known = REASONS | WARNINGS
    said = [_sentence(known.get(name, name)) for name in names] if len(notes) < len(names) else notes
    if verdict["valid"]:
        return ("Valid: it is ranked.", *said)
    return ("Not valid: it is not ranked.", *said)


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}."
