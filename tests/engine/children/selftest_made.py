"""The self-test's child with techniques of the test's own, which it registers before it lists or runs a check.

They do nothing, compute something else, want a process of their own, raise, die, hang, and are right.
"""

import ctypes
import os
import signal
from pathlib import Path
from typing import Any, ClassVar, Literal

from optigpu.child.tasks import main
from optigpu.techniques import TECHNIQUES
from optigpu.techniques.base import ModeOptions, Notes, Phase, Technique
from optigpu.vocabulary import Layer, UnsupportedError
from tests.engine.processes import STARTED


class Made(Technique):
    """What all of them share."""

    layer: ClassVar[Layer] = Layer.KERNELS
    phase: ClassVar[Phase] = Phase.KERNELS
    summary: ClassVar[str] = "made for a test"
    citation: ClassVar[str] = "none"


class Idle(Made):
    name: Literal["made_idle"] = "made_idle"

    def modules(self, model: Any, notes: Notes) -> None:
        """Nothing."""


class Wrong(Made):
    name: Literal["made_wrong"] = "made_wrong"

    def modules(self, model: Any, notes: Notes) -> None:
        """The weights of a norm are doubled."""
        model.transformer.ln_f.weight.mul_(2)
        notes.record(made="wrong")


class Rounding(Made):
    error_bound: ClassVar[float] = 0.1

    name: Literal["made_rounding"] = "made_rounding"

    def modules(self, model: Any, notes: Notes) -> None:
        """It only says that it rounds."""
        notes.record(made="rounding")


class NotANumber(Made):
    name: Literal["made_nan"] = "made_nan"

    def modules(self, model: Any, notes: Notes) -> None:
        model.transformer.ln_f.weight.fill_(float("nan"))
        notes.record(made="nan")


class Raising(Made):
    name: Literal["made_raising"] = "made_raising"

    def modules(self, model: Any, notes: Notes) -> None:
        raise RuntimeError("a layer is missing")


class Refusing(Made):
    name: Literal["made_refusing"] = "made_refusing"

    def modules(self, model: Any, notes: Notes) -> None:
        raise UnsupportedError("It needs another machine.")


class Hungry(Made):
    name: Literal["made_hungry"] = "made_hungry"

    def modules(self, model: Any, notes: Notes) -> None:
        raise MemoryError("8 GB were asked for")


class Dying(Made):
    name: Literal["made_dying"] = "made_dying"

    def modules(self, model: Any, notes: Notes) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)


class Hanging(Made):
    name: Literal["made_hanging"] = "made_hanging"

    def modules(self, model: Any, notes: Notes) -> None:
        """As a kernel hangs: no other thread of the process can run."""
        ctypes.PyDLL(None).sleep(3600)


class Right(Made):
    name: Literal["made_right"] = "made_right"

    def execution(self, options: ModeOptions) -> ModeOptions:
        return options.but(autograd="inference")


class Lone(Made):
    process_wide: ClassVar[bool] = True

    name: Literal["made_lone"] = "made_lone"

    def execution(self, options: ModeOptions) -> ModeOptions:
        return options.but(autograd="inference")


MADE: tuple[type[Made], ...] = (
    *(Idle, Wrong, Lone, Rounding, NotANumber, Raising, Refusing),
    *(Hungry, Dying, Hanging, Right),
)

if __name__ == "__main__":
    if STARTED in os.environ:
        with Path(os.environ[STARTED]).open("a") as started:
            print(os.getpid(), file=started)
    TECHNIQUES.update({str(kind.model_fields["name"].default): kind for kind in MADE})
    main()
