"""Whether a leaderboard ranks results, read from stored documents of any version."""

from collections import Counter
from collections.abc import Sequence

from optigpu.vocabulary import Document

NO_FIGURE = "no figure"


def why_none_ranks(results: Sequence[Document]) -> str | None:
    """Why a leaderboard ranks none of a job's results; None if it ranks one, or if there are none."""
    problems = [_problems(result) for result in results]
    if not problems or not all(problems):
        return None
    counts = Counter(reason for reasons in problems for reason in reasons)
    named = ", ".join(f"{reason} ({count} of {len(results)})" for reason, count in counts.items())
    notes = [note for result in results for note in result["verdict"].get("notes", ())[:1]]
    return " ".join([f"Nothing that was measured can be ranked: {named}.", *notes[:1]])


def _problems(result: Document) -> list[str]:
    """Why a result is not ranked; empty if it is."""
    verdict = result["verdict"]
    if not verdict["valid"]:
        return list(verdict["reasons"])
    figure = result["metrics"].get(result["variant"]["primary_metric"]) or {}
    return [] if figure.get("value") is not None else [NO_FIGURE]
