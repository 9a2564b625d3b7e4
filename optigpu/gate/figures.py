"""The number that a command prints, and which direction of it is better."""

import json
import math
import re
from typing import NamedTuple

from optigpu.vocabulary import METRICS, Better, OptiGPUError, SpecError

_NUMBER = r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+|(?<=\d)\.?)(?:[eE][-+]?\d+)?|[-+]?(?:nan|inf(?:inity)?)"
_NAMED = {
    Better.HIGHER: r"(/|per)_?s(ec(ond)?)?$|\b[fqrt]ps$|throughput|speedup|accuracy|score|goodput|flops",
    Better.LOWER: r"(\b|_)([nmuµ]?s|seconds?|minutes|[kmgt]?i?b)(/\w+)?$|bytes|latency|time|memory|loss|perplexity",
}
"""Names of metrics by which direction is better; the first that fits counts."""


class FigureError(OptiGPUError):
    """A command's output does not hold the one positive number that is asked for."""


class Wanted(NamedTuple):
    """The metric whose number a command prints, None for the seconds that it takes; and which direction is better."""

    metric: str | None
    better: Better


def wanted(metric: str | None, better: Better | None) -> Wanted:
    """Raises SpecError where nobody says which direction is better."""
    if metric is None:
        return Wanted(None, better or Better.LOWER)
    if not metric.strip():
        raise SpecError("--metric is empty; name the number that the command prints, such as tokens/s.")
    known = [METRICS[part].better for part in metric.split(".") if part in METRICS]
    by_name = [each for each, names in _NAMED.items() if re.search(names, metric.strip(), re.IGNORECASE)]
    for found in (better, *known, *by_name):
        if found is not None:
            return Wanted(metric.strip(), found)
    raise SpecError(
        f"Nothing says which direction of {metric} is better: add --higher-is-better or --lower-is-better."
    )


def figure_in(output: str, metric: str) -> float:
    """The number of the metric: in JSON that of its key (`a.b.0.c` leads into objects and lists); else the one right
    after the name or right before it; else a line that is a number alone. Raises FigureError unless there is one, and
    it is positive."""
    found = _of_json(output, metric)
    if found is None:
        found = _beside_the_name(output, metric) or _alone(output)
    if not found:
        raise FigureError(
            f"printed no number for {metric} on stdout; print a line such as `{metric}: 123.4`, or name another metric"
        )
    if len(found) > 1:
        shown = ", ".join(found[:4]) + (", ..." if len(found) > 4 else "")
        raise FigureError(f"printed {len(found)} numbers for {metric} ({shown}); print it once")
    value = float(found[0].replace(",", ""))
    if not math.isfinite(value) or value <= 0:
        raise FigureError(f"printed {found[0]} for {metric}; a ratio needs a number above 0")
    return value


def _of_json(output: str, metric: str) -> list[str] | None:
    """None where the output, or its last line, is no JSON object or list."""
    lines = output.strip().splitlines()
    for text in (output, lines[-1] if lines else ""):
        try:
            document = json.loads(text)
        except ValueError:
            continue
        if isinstance(document, dict | list):
            value = _inside(document, metric)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            return [repr(value)] if is_number else []
    return None


def _inside(document: object, path: str) -> object:
    if isinstance(document, dict) and path in document:
        return document[path]
    for part in path.split("."):
        if isinstance(document, list) and part.isdecimal() and int(part) < len(document):
            document = document[int(part)]
        elif isinstance(document, dict):
            document = document.get(part)
        else:
            return None
    return document


def _beside_the_name(output: str, metric: str) -> list[str]:
    name = rf"(?<![\w/.]){re.escape(metric)}(?![\w/])"
    after = rf"{name}[\"']?\s*(?:[:=|]\s*|\s)({_NUMBER})(?![\w.,]\w|\w)"
    before = rf"(?<![\w.,])({_NUMBER})\s*{name}"
    found: list[str] = []
    for line in output.splitlines():
        for pattern in (after, before):
            numbers = [number for number in re.findall(pattern, line, re.IGNORECASE) if number]
            found += numbers
            if numbers:
                break
    return found


def _alone(output: str) -> list[str]:
    lines = (line.strip() for line in output.splitlines())
    return [line for line in lines if line and re.fullmatch(_NUMBER, line, re.IGNORECASE)]
