"""How a program of this folder is told what to do, and how it answers: one JSON object in a line."""

import json
import os
import sys
import threading
from collections.abc import Mapping
from typing import NoReturn, TextIO

Request = Mapping[str, object]


class RefusalError(Exception):
    """The request cannot be fulfilled. `wrong` tells a wrong request from a model that cannot be converted."""

    def __init__(self, sentence: str, *, wrong: bool = False) -> None:
        super().__init__(sentence)
        self.wrong = wrong


class Answers:
    """The pipe to the parent, apart from what libraries print."""

    def __init__(self, descriptor: int) -> None:
        self._pipe: TextIO = os.fdopen(descriptor, "w", encoding="utf-8")

    def doing(self, text: str) -> None:
        self._send({"doing": text})

    def done(self, outcome: Request) -> None:
        self._send({"done": outcome})

    def refuse(self, refusal: RefusalError) -> None:
        self._send({"refused": str(refusal), "wrong": refusal.wrong})

    def _send(self, message: Request) -> None:
        self._pipe.write(json.dumps(message) + "\n")
        self._pipe.flush()


def main(step: str) -> None:
    """Reads the request from stdin, runs the program `build` or `evaluate` and answers. Ends at once when the parent
    does."""
    answers = Answers(int(sys.argv[1]))
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        try:
            if step == "build":
                answers.doing("loading TensorFlow")
                from .build import build as program
            else:
                from .evaluate import evaluate as program
        except ImportError as error:
            raise RefusalError(
                f"Converting needs TensorFlow, LiteRT and TFLite Micro, and this Python lacks {error.name or error}: "
                'pip install -e ".[hardware]", or name another Python with --python.'
            ) from None
        answers.done(program(request, answers))
    except RefusalError as refusal:
        answers.refuse(refusal)
    except MemoryError:
        answers.refuse(RefusalError("There is not enough memory to convert the model; use a smaller one."))


def _end_with_parent() -> NoReturn:
    """Stdin ends when the parent closes it or dies. Python's own reader would hold a lock while the program ends."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(1)
