"""How long parts of earlier runs took on this machine, by which the next run's are guessed."""

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from optigpu.job.spec import Variant, digest
from optigpu.paths import cache_dir, draft_of
from optigpu.vocabulary import UnsupportedError

NEWEST = 0.5
"""The share that the newest run has in what is kept; the rest is that of the earlier ones."""
MOST = 4000
"""Numbers that are kept: the oldest make room for others."""


@dataclass(frozen=True)
class Rates:
    """Seconds of parts, by what they are of."""

    seconds: Mapping[str, float] = field(default_factory=dict)

    def of(self, variant: Variant, part: str) -> float | None:
        """What the part took of the same variant, or of the same stack on another model or workload; None if neither
        was measured."""
        return next((self.seconds[key] for key in _keys(variant, part) if key in self.seconds), None)

    def preparing(self, model: str | None, *, quality: bool) -> float | None:
        """What the preparation of a job took: the machine's peaks, and the reference of quality."""
        return self.seconds.get(_preparing(model, quality=quality))

    def with_parts(self, took: Mapping[tuple[Variant, str], float]) -> "Rates":
        """After a run in which parts took so long."""
        found = {key: seconds for (variant, part), seconds in took.items() for key in _keys(variant, part)}
        return self._with(found)

    def with_preparing(self, model: str | None, seconds: float, *, quality: bool) -> "Rates":
        """After a run that prepared for so long."""
        return self._with({_preparing(model, quality=quality): seconds})

    def _with(self, found: Mapping[str, float]) -> "Rates":
        blended = {
            key: seconds + (1 - NEWEST) * (self.seconds.get(key, seconds) - seconds)
            for key, seconds in found.items()
        }
        others = {key: seconds for key, seconds in self.seconds.items() if key not in blended}
        return Rates(dict([*others.items(), *blended.items()][-MOST:]))


NO_RATES = Rates()


def known_rates() -> Rates:
    """Those of this machine; none where no run has ended yet, or the file cannot be read."""
    with suppress(OSError, ValueError, UnsupportedError):
        found = json.loads(_file().read_text(encoding="utf-8"))
        if isinstance(found, dict):
            numbers = {key: each for key, each in found.items() if isinstance(each, int | float)}
            return Rates({key: each for key, each in numbers.items() if 0 <= each < math.inf})
    return NO_RATES


def keep_rates(rates: Rates) -> None:
    """Writes the file, whole or not at all; where it cannot be written the next run guesses."""
    with suppress(OSError, UnsupportedError):
        _file().parent.mkdir(parents=True, exist_ok=True)
        with draft_of(_file()) as draft:
            draft.write_text(json.dumps(rates.seconds, indent=0), encoding="utf-8")


def _file() -> Path:
    return cache_dir() / "rates.json"


def _keys(variant: Variant, part: str) -> tuple[str, str]:
    """The variant's own, and that of its stack."""
    stack = [technique.identity() for technique in variant.stack]
    where = f"{part} {variant.backend} {variant.device}"
    own = digest({"stack": stack, "model": variant.model, "workload": variant.workload.identity()})
    return f"{where} {own}", f"{where} {digest({'stack': stack})}"


def _preparing(model: str | None, *, quality: bool) -> str:
    return f"prepare {model}{' with quality' if quality else ''}"
