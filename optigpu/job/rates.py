"""How long parts of earlier runs took on this machine, by which the next run's are guessed."""

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from optigpu.job.spec import Variant, digest
from optigpu.paths import cache_dir, draft_of
from optigpu.vocabulary import UnsupportedError

NEWEST = 0.5
"""The share that a longer newest run has in what is kept. A shorter one has all: what a first run packs or compiles is
kept on disk for the next ones."""
MOST = 4000
"""Numbers that are kept: the oldest make room for others."""


@dataclass(frozen=True)
class Rates:
    """Seconds of parts by what they are of, and how many times what is guessed a stack takes of them."""

    seconds: Mapping[str, float] = field(default_factory=dict)

    def expected(self, variant: Variant, part: str, guessed_s: float) -> float | None:
        """What the part took of the same variant, or what was guessed times as much as it took of the same stack on
        another model or workload; None if neither was measured."""
        return self._expected(_keys(variant, part), guessed_s)

    def preparing(self, need: "Need") -> float:
        """What a part of a job's preparation took, for this model or another one, else what is guessed."""
        known = self._expected(need.keys, need.guessed_s)
        return need.guessed_s if known is None else known

    def _expected(self, keys: tuple[str, str], guessed_s: float) -> float | None:
        own, shared = keys
        if own in self.seconds:
            return self.seconds[own]
        return guessed_s * self.seconds[shared] if shared in self.seconds else None

    def with_run(
        self,
        parts: Mapping[tuple[Variant, str], "Took"],
        preparing: Mapping["Need", float] = MappingProxyType({}),
        slowed: float = 1.0,
    ) -> "Rates":
        """After a run in which parts and the preparation took so long. A first run of something tells of others like
        it; a later one finds what is kept of it.

        Other processes made the run take about `slowed` times as long. A first run then counts as that much shorter,
        and a longer later one does not count.
        """
        newest = NEWEST if slowed == 1 else 0.0
        took = {_keys(variant, part): each for (variant, part), each in parts.items()}
        took |= {need.keys: Took(seconds, need.guessed_s) for need, seconds in preparing.items()}
        found = {
            own: each.seconds if own in self.seconds else each.again * each.seconds / slowed
            for (own, _), each in took.items()
        }
        new = {
            keys: each for keys, each in took.items() if keys[0] not in self.seconds and each.guessed_s > 0
        }
        found |= {shared: each.seconds / each.guessed_s / slowed for (_, shared), each in new.items()}
        blended = {
            key: min(value, value + (1 - newest) * (self.seconds.get(key, value) - value))
            for key, value in found.items()
        }
        others = {key: value for key, value in self.seconds.items() if key not in blended}
        return Rates(dict([*others.items(), *blended.items()][-MOST:]))


class Took(NamedTuple):
    """What a part took, and what was guessed before any run; `again` is the share of it that the next run of the same
    variant is expected to take, where what it made is kept on disk."""

    seconds: float
    guessed_s: float
    again: float = 1.0


class Need(NamedTuple):
    """A part of a job's preparation: its name, the model that it is for, and what it takes by a first guess."""

    part: str
    model: str
    guessed_s: float

    @property
    def keys(self) -> tuple[str, str]:
        return f"prepare {self.part} {self.model}", f"times prepare {self.part}"


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
    """Of the variant's own seconds, and of how many times what is guessed its stack takes."""
    stack = [technique.identity() for technique in variant.stack]
    where = f"{part} {variant.backend} {variant.device}"
    own = digest({"stack": stack, "model": variant.model, "workload": variant.workload.identity()})
    return f"{where} {own}", f"times {where} {digest({'stack': stack})}"
