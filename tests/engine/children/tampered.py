"""The real measuring process with a technique on top of its stack that no honest one holds; its argument names it."""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

from optigpu.backends import BACKENDS
from optigpu.child import replicate
from optigpu.techniques.base import Basis, Expected, Loop, Notes, Phase, Technique
from optigpu.vocabulary import Layer


class Tampering(Technique):
    """What all of them share."""

    layer: ClassVar[Layer] = Layer.MEMORY
    phase: ClassVar[Phase] = Phase.COMPILATION
    summary: ClassVar[str] = "tampers"
    citation: ClassVar[str] = "none"
    expected: ClassVar[tuple[Expected, ...]] = (Expected(Basis.AIM, "to be found out"),)

    name: str = "tampering"


class Remembers(Tampering):
    """Decodes each prompt once and answers from memory after that."""

    def loop(self, loop: Loop, model: Any, notes: Notes) -> Loop:
        """The marks are taken as the honest loop takes them."""
        answers: dict[tuple[int, ...], Any] = {}

        def remembered(prompt: Any, new_tokens: int, clock: Any) -> tuple[Any, list[Any]]:
            key = tuple(prompt.flatten().tolist())
            if key not in answers:
                tokens, marks = loop(prompt, new_tokens, clock)
                answers[key] = tokens
                return tokens, marks
            return answers[key], [clock.mark() for _ in range(new_tokens + 1)]

        return remembered


class LosesOne(Tampering):
    """Gives one token fewer than it was asked for."""

    def loop(self, loop: Loop, model: Any, notes: Notes) -> Loop:
        """Stops early."""
        return lambda prompt, new_tokens, clock: loop(prompt, new_tokens - 1, clock)


class NotANumber(Tampering):
    """Has one weight of each matrix that is NaN."""

    def modules(self, model: Any, notes: Notes) -> None:
        """Spoils the model as it is loaded."""
        spoil(model)


class SpoiledLater(Tampering):
    """Is spoiled after its output was looked at."""

    def modules(self, model: Any, notes: Notes) -> None:
        """Remembers the model."""
        MODELS[:] = [model]

    def loop(self, loop: Loop, model: Any, notes: Notes) -> Loop:
        """The third request spoils it."""
        requests = iter(range(sys.maxsize))

        def spoiling(prompt: Any, new_tokens: int, clock: Any) -> tuple[Any, list[Any]]:
            if next(requests) == 2:
                spoil(MODELS[0])
            return loop(prompt, new_tokens, clock)

        return spoiling


MODELS: list[Any] = []
TAMPERINGS = {kind.__name__: kind for kind in (Remembers, LosesOne, NotANumber, SpoiledLater)}


def spoil(model: Any) -> None:
    """Puts a NaN into every matrix."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.view(-1)[0] = float("nan")


def tamper(name: str) -> Callable[..., Any]:
    """The torch backend's `prepare` with that technique on top of the stack."""
    tampering, honest = TAMPERINGS[name](), BACKENDS["torch"].prepare

    def prepare(order: Any, progress: Any) -> Any:
        """The honest stack and one more."""
        return honest(replace(order, stack=(*order.stack, tampering)), progress)

    return prepare


if __name__ == "__main__":
    backend: Any = BACKENDS["torch"]
    backend.prepare = tamper(sys.argv.pop(1))
    replicate.main()
