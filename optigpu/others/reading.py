"""Reads files of other tools by tables that say which of their figures is which of ours."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import MappingProxyType

from optigpu.documents.others import LONGEST_TEXT, LeftOut, OthersFigure, OthersFile, OthersRow, Statistic
from optigpu.vocabulary import SpecError, harmless

UNITS: Mapping[str, float] = MappingProxyType(
    {
        "s": 1.0,
        "sec": 1.0,
        "ms": 1e-3,
        "us": 1e-6,
        "ns": 1e-9,
        "MB": 1e6,
        "GB": 1e9,
        "tokens/s": 1.0,
        "tokens/sec": 1.0,
        "requests/s": 1.0,
        "requests/sec": 1.0,
    }
)
"""Units that files print, as multiples of ours."""
NO_METRIC = "OptiGPU has no such metric"
MISSING = "missing in the file"
Object = Mapping[str, object]


@dataclass(frozen=True)
class Counted:
    """A figure of a tool that counts what our metric counts. `path` leads to it, by dots, with {} where one of
    `statistics` stands, each under its name of ours. `factor` turns it into our unit; None where a `unit` stands
    beside it."""

    metric: str
    path: str
    statistics: Mapping[Statistic, str]
    factor: float | None = 1.0
    differs: str | None = None


@dataclass(frozen=True)
class Part:
    """A part of a file that becomes a row. `others` says of figures why they are none of ours; `place` stands before
    their names, where several parts have the same ones."""

    label: str
    document: Object
    counted: tuple[Counted, ...]
    others: Mapping[str, str] = field(default_factory=dict)
    place: str = ""


@dataclass(frozen=True)
class About:
    """What a file says of itself; None is unknown."""

    version: str | None = None
    measured_at: datetime | None = None
    model: str | None = None
    hardware: str | None = None


@dataclass(frozen=True)
class Format:
    """A kind of file. `begins` is what every such file has; `about` and `parts` read one that has it."""

    tool: str
    begins: Callable[[object], bool]
    about: Callable[[object], About]
    parts: Callable[[object], Iterator[Part]]

    def read(self, document: object) -> OthersFile:
        """Raises SpecError if the file has no figure that is one of ours."""
        left_out: dict[str, str] = {}
        rows = [row for part in self.parts(document) if (row := _row(part, left_out))]
        if not rows:
            raise SpecError(
                f"The file looks like one of {self.tool}, and holds no figure that OptiGPU knows."
            )
        skipped = tuple(LeftOut(named=line(name), why=why) for name, why in sorted(left_out.items()))
        about = self.about(document)
        return OthersFile(tool=self.tool, rows=tuple(rows), left_out=skipped, **vars(about))


def _row(part: Part, left_out: dict[str, str]) -> OthersRow | None:
    figures = []
    known = set()
    for counted in part.counted:
        for statistic, word in counted.statistics.items():
            path = counted.path.format(word)
            known.add(path.partition(".")[0])
            found = _figure(part.document, counted, path)
            if isinstance(found, str):
                left_out[part.place + path] = found
            else:
                named = {"statistic": statistic, "named": part.place + path, "differs": counted.differs}
                figures.append(
                    OthersFigure.model_validate({"metric": counted.metric, "value": found, **named})
                )
    present = {name for name, value in part.document.items() if _has_number(value)}
    left_out |= {part.place + name: part.others.get(name, NO_METRIC) for name in present - known}
    return OthersRow(label=line(part.label), figures=tuple(figures)) if figures else None


def _figure(document: Object, counted: Counted, path: str) -> float | str:
    """The figure in our unit, or why there is none."""
    value = at(document, path)
    if value is None:
        return MISSING
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return "not a finite number"
    if counted.factor is not None:
        return value * counted.factor
    unit = at(document, ".".join((*path.split(".")[:-1], "unit")))
    return value * UNITS[unit] if isinstance(unit, str) and unit in UNITS else f"in an unknown unit, {unit}"


def _has_number(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_number, value.values()))
    return isinstance(value, int | float) and not isinstance(value, bool)


def at(document: object, path: str) -> object:
    """The value at a path of keys and of places in lists, by dots; None where there is none."""
    for key in path.split("."):
        if isinstance(document, Mapping):
            document = document.get(key)
        elif isinstance(document, list) and key.isdecimal() and int(key) < len(document):
            document = document[int(key)]
        else:
            return None
    return document


def text(document: object, path: str) -> str | None:
    """A text or a number at a path on one line; None for anything else, and for an empty one."""
    value = at(document, path)
    if isinstance(value, float):
        return f"{value:g}"
    return line(str(value)) or None if isinstance(value, str | int) else None


def line(value: str) -> str:
    """A text as a document may hold it: on one line, without characters that steer a terminal, cut to its length."""
    return harmless(" ".join(value.split()))[:LONGEST_TEXT]


def moment(value: object) -> datetime | None:
    """A moment that is written as a Unix time or in ISO 8601. One without a time zone is unknown: None."""
    try:
        found = datetime.fromtimestamp(value, UTC) if isinstance(value, int | float) else None
        found = datetime.fromisoformat(value) if isinstance(value, str) else found
    except (ValueError, OverflowError, OSError):
        return None
    return found if found is not None and found.tzinfo is not None else None


def objects(document: object, path: str = "") -> list[Object]:
    """The objects of the list at a path; of the document itself for an empty one."""
    found = at(document, path) if path else document
    return [each for each in found if isinstance(each, Mapping)] if isinstance(found, list) else []
