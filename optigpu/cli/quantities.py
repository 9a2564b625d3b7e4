"""Sizes and durations as they are written on the command line: 8GB, 512MiB, 90s, 30m, 1h30m."""

import re
from typing import NamedTuple

from optigpu.cli.flagged import FlagValue
from optigpu.vocabulary import SpecError


class Unit(NamedTuple):
    """What a field's number counts. `suffix` is the end of the field's name that the flag's name leaves out."""

    suffix: str
    factors: dict[str, float]
    example: str


SIZE = Unit(
    "_bytes",
    {"": 1, "B": 1}
    | {f"{prefix}B": 1000.0**power for power, prefix in enumerate("KMGT", 1)}
    | {f"{prefix}iB": 1024.0**power for power, prefix in enumerate("KMGT", 1)},
    "bytes, or a size such as 8GB or 512MiB",
)
DURATION = Unit("_s", {"": 1, "S": 1, "M": 60, "H": 3600}, "seconds, or a time such as 90s, 30m or 1h30m")


def unit_of(field: str) -> Unit | None:
    """The unit that the end of a field's name tells."""
    if field.endswith("_seconds"):
        return DURATION
    return next((unit for unit in (SIZE, DURATION) if field.endswith(unit.suffix)), None)


def read_quantity(value: FlagValue, unit: Unit, flag: str) -> float:
    """The number in the field's unit. Raises SpecError for what is not a sum of numbers with units."""
    text = str(value).replace(" ", "")
    parts = re.findall(r"([0-9.]+(?:[eE][+-]?[0-9]+)?)([A-Za-z]*)", text)
    factors = {name.lower(): factor for name, factor in unit.factors.items()}
    try:
        if not parts or "".join(number + name for number, name in parts) != text:
            raise ValueError
        total = sum((float(number) * factors[name.lower()] for number, name in parts), 0.0)
    except (ValueError, KeyError):
        given = flag.replace("_", "-")
        raise SpecError(f"--{given} {value}: write {unit.example}.") from None
    return int(total) if total.is_integer() else total
