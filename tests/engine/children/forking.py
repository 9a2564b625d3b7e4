"""A process that has imported torch and transformers, and by forking becomes a program of ours as often as it is asked.

    python -P -m tests.engine.children.forking DESCRIPTOR

On the socket it hears of one process after the other, with its descriptors, and answers with its id. The new process
belongs to the one that asked, which adopts orphans meanwhile, and then runs its program as `python -m` would.
"""

import gc
import os
import runpy
import socket
import sys
import time
from importlib import import_module

from optigpu.backends import BACKENDS
from optigpu.vocabulary import Frozen

LONGEST_ORDER, MOST_DESCRIPTORS = 2**17, 32
READY = b"ready"
PROGRAM = "optigpu.child.replicate"
"""Whose imports are made."""


class Order(Frozen):
    """A process: who asks for it, its module with its arguments, its variables and its folder.

    `descriptors` are the numbers under which it finds those that come with the order.
    """

    parent: int
    program: tuple[str, ...]
    variables: dict[str, str]
    folder: str
    descriptors: tuple[int, ...]


def main() -> None:
    """Returns in each new process when its program has ended; the first one ends with the socket."""
    asked = socket.socket(fileno=int(sys.argv[1]))
    import_module(PROGRAM)
    BACKENDS["torch"].start(model=True)
    gc.collect()
    gc.freeze()
    asked.send(READY)
    while True:
        line, received, _, _ = socket.recv_fds(asked, LONGEST_ORDER, MOST_DESCRIPTORS)
        if not line:
            return
        order = Order.model_validate_json(line)
        between = os.fork()
        if between == 0:
            if os.fork() == 0:
                _become(order, received, asked)
                return
            os._exit(0)
        os.waitpid(between, 0)
        for descriptor in received:
            os.close(descriptor)


def _become(order: Order, received: list[int], asked: socket.socket) -> None:
    """Makes this process what a new interpreter would be, and runs the program."""
    os.setsid()
    while os.getppid() != order.parent:  # the process between them has not ended
        time.sleep(0.001)
    asked.send(str(os.getpid()).encode())
    asked.close()
    _put(received, order.descriptors)
    os.chdir(order.folder)
    os.environ.clear()
    os.environ.update(order.variables)
    sys.argv[:] = order.program
    for word in order.program:
        sys.modules.pop(word, None)  # what is run as the program is not imported before
    runpy.run_module(order.program[0], run_name="__main__", alter_sys=True)


def _put(received: list[int], numbers: tuple[int, ...]) -> None:
    """Gives the descriptors their numbers; none of them is overwritten before it has been copied."""
    above = max(*received, *numbers) + 1
    for descriptor in received:
        os.dup2(descriptor, above + descriptor)
        os.close(descriptor)
    for descriptor, number in zip(received, numbers, strict=True):
        os.dup2(above + descriptor, number)
        os.close(above + descriptor)


if __name__ == "__main__":
    main()
