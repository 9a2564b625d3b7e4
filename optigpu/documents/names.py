"""Which names somebody may have meant who wrote one that is not known."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

LONGEST_NAME = 80
MOST_CLOSE = 4
LEAST_ALIKE = 0.6
SHORT, SHORT_ALIKE = 3, 0.7
"""Two letters of three say little: who writes gpu does not mean cpu."""


def closest(given: str, names: Iterable[str]) -> list[str]:
    """The names that begin with the given one, contain it, or are spelled alike, in this order."""
    spelled = {name.casefold(): name for name in sorted(names)}
    wanted = given[:LONGEST_NAME].casefold()
    begun = [name for name in spelled if wanted and name.startswith(wanted)]
    containing = [name for name in spelled if len(wanted) >= SHORT and wanted in name]
    alike = get_close_matches(wanted, spelled, cutoff=LEAST_ALIKE if len(wanted) > SHORT else SHORT_ALIKE)
    return [
        spelled[name]
        for name in dict.fromkeys([*sorted(begun, key=len), *sorted(containing, key=len), *alike])
    ][:MOST_CLOSE]


def did_you_mean(close: Sequence[str]) -> str:
    """A question that goes on a sentence, with a space before it; empty where nothing is close."""
    if not close:
        return ""
    *others, last = close
    return f" Did you mean {', '.join(others)} or {last}?" if others else f" Did you mean {last}?"
