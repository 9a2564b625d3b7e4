"""What measures within a measuring process, and whether a technique replaced a part of it.

The functions of the clocks, meters, workloads and backends are noted before a technique is applied, and held against
what is there after the last request. Whoever wants to deceive this too must change it as well; what the conductor sees
from outside (`optigpu.conductor.verdicts.contradictions`) needs nothing of this process. This module is imported by its
name, unlike the program that uses it, so that its own functions are noted too.
"""

import sys
import time
from collections.abc import Iterator, Mapping
from types import FunctionType, ModuleType

from optigpu.meters import METERS

MOST_NAMED = 8
"""How many replaced parts a message names."""
_OURS = "optigpu."
_CHANGING = ("optigpu.techniques", "optigpu.surgery", "optigpu.models", "optigpu.ops")
"""What techniques are made of, and what they may change."""


class Harness:
    """The functions that measure, as they were when this was made: after the engine's modules were imported."""

    def __init__(self) -> None:
        self._before = dict(_parts())

    def replaced(self) -> tuple[str, ...]:
        """The names of those that are others by now, sorted; at most MOST_NAMED."""
        now = dict(_parts())
        changed = sorted(
            name
            for name, (part, code) in self._before.items()
            if name not in now or part is not now[name][0] or code is not now[name][1]
        )
        return tuple(changed[:MOST_NAMED])


def _parts() -> Iterator[tuple[str, tuple[object, object]]]:
    """Each function with its code, which can be exchanged by itself."""
    yield from _functions("time", vars(time))
    for name, module in list(sys.modules.items()):
        if name.startswith(_OURS) and not name.startswith(_CHANGING) and isinstance(module, ModuleType):
            yield from _functions(name, vars(module))
            for kind, value in list(vars(module).items()):
                if isinstance(value, type) and value.__module__ == name:
                    yield from _functions(f"{name}.{kind}", vars(value))
    for name, meter in METERS.items():
        yield f"the meter {name}", (meter, None)


def _functions(where: str, members: Mapping[str, object]) -> Iterator[tuple[str, tuple[object, object]]]:
    for name, value in list(members.items()):
        if isinstance(value, FunctionType):
            yield f"{where}.{name}", (value, value.__code__)
        elif callable(value) and not isinstance(value, type):
            yield f"{where}.{name}", (value, None)
