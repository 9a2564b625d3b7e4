"""The real measuring process with a technique of `attacks` on top of its stack; its argument names it."""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from optigpu.backends import BACKENDS
from optigpu.child import replicate
from tests.engine.children import attacks


def tamper(name: str) -> Callable[..., Any]:
    """The torch backend's `prepare` with that technique on top of the stack."""
    tampering, honest = getattr(attacks, name)(), BACKENDS["torch"].prepare

    def prepare(order: Any, progress: Any) -> Any:
        """The honest stack and one more."""
        return honest(replace(order, stack=(*order.stack, tampering)), progress)

    return prepare


if __name__ == "__main__":
    backend: Any = BACKENDS["torch"]
    backend.prepare = tamper(sys.argv.pop(1))
    replicate.main()
