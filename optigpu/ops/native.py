"""C++ operators with a path for each instruction set: loads them once and finds this CPU's best path."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Generic, TypeVar

from optigpu.ops.build import register
from optigpu.vocabulary import UnsupportedError

Name = TypeVar("Name", bound=str)


class NativeOperators(Generic[Name]):
    """The operators of `sources`. `numbers` has the paths' names and their numbers in the enumeration InstructionSet.

    `best` and `fakes` are as in `register`. Built at first use.
    """

    def __init__(
        self,
        sources: tuple[Path, ...],
        best: str,
        fakes: Mapping[str, Callable[..., object]],
        numbers: Mapping[Name, int],
    ) -> None:
        self._register = functools.partial(register, sources, best, fakes)
        self._numbers = numbers

    @functools.cached_property
    def best(self) -> Name:
        """The newest path that this CPU can run. Raises UnsupportedError if the operators cannot be built."""
        number = self._register()
        return next(name for name, known in self._numbers.items() if known == number)

    @functools.cached_property
    def reason(self) -> str | None:
        """Why the operators cannot be used here, in one sentence; None if they can. Builds them when needed."""
        try:
            _ = self.best
        except UnsupportedError as error:
            return str(error)
        return None
