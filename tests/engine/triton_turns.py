"""Several programs of one interpreted kernel that take turns where they wait for each other; see triton_persistent.py.

Triton's interpreter runs a program to its end before it begins the next, so that one which waits for another would wait
for ever. Here each has a thread of its own, of which one runs at a time, up to where it has to wait. Then another one
goes on, drawn by chance. What one program must not read before another has written it is thus read too early, unless
the kernel waits in between. That threads of a GPU see each other's stores is not shown.
"""

import inspect
import random
import threading
from typing import Any

from triton.runtime import interpreter

from optigpu.ops.decode.cuda import triton_barrier
from optigpu.ops.kernel import KernelCall

SECONDS = 60


class Turns:
    """Who runs. `waiting` is whether programs wait at all."""

    def __init__(self, programs: int, seed: int, waiting: bool) -> None:
        self._unfinished = list(range(programs))
        self._programs, self._waiting = programs, waiting
        self._random = random.Random(seed)
        self._changed = threading.Condition()
        self._current = self._random.choice(self._unfinished)
        self._passed: Any = triton_barrier.passed
        self.errors: list[Exception] = []

    def run(self, program: int, function: Any, arguments: dict[str, Any]) -> None:
        """A program from its start to its end."""
        self._await_turn(program)
        try:
            function(**arguments)
        except Exception as error:
            self.errors.append(error)
        self._unfinished.remove(program)
        self._give_turn()

    def passed(self, arrivals: Any, ticket: Any) -> Any:
        """In place of the barrier's: whoever may not pass lets another one go on."""
        program = self._current
        if not self._waiting or self.errors:
            return True
        if self._passed(arrivals, ticket):
            return True
        self._give_turn()
        self._await_turn(program)
        return self._passed(arrivals, ticket)

    def _give_turn(self) -> None:
        with self._changed:
            if self._unfinished:
                self._current = self._random.choice(self._unfinished)
            self._changed.notify_all()

    def _await_turn(self, program: int) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._current == program, SECONDS):
                raise TimeoutError(f"Program {program} never had its turn.")
        interpreter.interpreter_builder.set_grid_dim(self._programs, 1, 1)
        interpreter.interpreter_builder.set_grid_idx(program, 0, 0)


def run_in_turns(call: KernelCall, seed: int, waiting: bool = True) -> None:
    """Launches it; its grid has one dimension."""
    kernel: Any = call.kernel
    executor = interpreter.GridExecutor(kernel.rewrite(), kernel.arg_names, call.grid)
    given = inspect.getcallargs(executor.fn, *call.arguments, **call.constants)
    arguments = {
        name: value if name in executor.constexprs else interpreter._implicit_cvt(value)
        for name, value in given.items()
    }
    turns = Turns(call.grid[0], seed, waiting)
    scope, passed = interpreter._patch_lang(executor.fn), triton_barrier.passed
    triton_barrier.passed = turns.passed
    try:
        threads = [
            threading.Thread(target=turns.run, args=(program, executor.fn, arguments), daemon=True)
            for program in range(call.grid[0])
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
    finally:
        triton_barrier.passed = passed
        scope.restore()
    assert not any(thread.is_alive() for thread in threads), "a program still waits"
    if turns.errors:
        raise turns.errors[0]
