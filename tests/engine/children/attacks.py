"""Techniques that no honest stack holds: each tries to look faster, or better, than it is."""

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np

from optigpu.techniques.base import Expected, Loop, Notes, Phase, Technique
from optigpu.vocabulary import Layer


class Tampering(Technique):
    """What all of them share."""

    layer: ClassVar[Layer] = Layer.MEMORY
    phase: ClassVar[Phase] = Phase.COMPILATION
    summary: ClassVar[str] = "tampers"
    citation: ClassVar[str] = "none"
    expected: ClassVar[tuple[Expected, ...]] = (Expected("aim", "to be found out"),)

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


class ChangesInputs(Tampering):
    """Overwrites each prompt with the same one, whose answer it remembers."""

    def loop(self, loop: Loop, model: Any, notes: Notes) -> Loop:
        """So that a fresh prompt is answered as fast as a repeated one."""
        remembered = Remembers().loop(loop, model, notes)

        def changing(prompt: Any, new_tokens: int, clock: Any) -> tuple[Any, list[Any]]:
            prompt.fill_(7)
            return remembered(prompt, new_tokens, clock)

        return changing


class ChangesTimedInputs(Tampering):
    """Overwrites one prompt alone, that which is timed, after its answer was checked."""

    def loop(self, loop: Loop, model: Any, notes: Notes) -> Loop:
        """From the third request on, and only the first prompt that it was ever given."""
        first: list[Any] = []
        calls = iter(range(sys.maxsize))

        def changing(prompt: Any, new_tokens: int, clock: Any) -> tuple[Any, list[Any]]:
            first[:] = first or [prompt]
            if next(calls) >= 2 and prompt.data_ptr() == first[0].data_ptr():
                prompt.fill_(7)
            return loop(prompt, new_tokens, clock)

        return changing


class FinishesLater(Tampering):
    """Stops the clock, and has another thread do the work then."""

    def loop(self, loop: Loop, model: Any, notes: Notes) -> Loop:
        """The answer is right: it is waited for after the last mark."""

        def deferring(prompt: Any, new_tokens: int, clock: Any) -> tuple[Any, list[Any]]:
            marks = [clock.mark() for _ in range(new_tokens + 1)]
            made: list[Any] = []
            worker = threading.Thread(target=lambda: made.append(loop(prompt, new_tokens, clock)[0]))
            worker.start()
            worker.join()
            return made[0], marks

        return deferring


class AnswersFirst(Tampering):
    """Gives an empty answer at once, which another thread would fill in later."""

    def loop(self, loop: Loop, model: Any, notes: Notes) -> Loop:
        """What is copied out of it is not there yet. One thread at a time: requests come faster than answers."""

        def early(prompt: Any, new_tokens: int, clock: Any) -> tuple[Any, list[Any]]:
            marks = [clock.mark() for _ in range(new_tokens + 1)]
            answer = prompt.new_ones(prompt.shape[0], new_tokens).cumsum(dim=1)
            if not any(thread.is_alive() for thread in LATE):
                LATE[:] = [threading.Timer(0.1, lambda: answer.copy_(loop(prompt, new_tokens, clock)[0]))]
                LATE[0].start()
            return answer, marks

        return early


class HalfPrecision(Tampering):
    """Computes in bfloat16 under another name."""

    def modules(self, model: Any, notes: Notes) -> None:
        """The loader was asked for float32."""
        import torch

        model.to(torch.bfloat16)


class KnowsTheSeed(Tampering):
    """Draws the prompts that the job's seed gives, and has their answers ready before they are asked."""

    def loop(self, loop: Loop, model: Any, notes: Notes) -> Loop:
        """Those of the first sixteen."""
        remembered = Remembers().loop(loop, model, notes)
        is_ready: list[bool] = []

        def foreseeing(prompt: Any, new_tokens: int, clock: Any) -> tuple[Any, list[Any]]:
            if not is_ready:
                is_ready.append(True)
                source = np.random.default_rng(0)
                for _ in range(16):
                    drawn = source.integers(model.config.vocab_size, size=tuple(prompt.shape), dtype=np.int64)
                    remembered(prompt.new_tensor(drawn), new_tokens, clock)
            return remembered(prompt, new_tokens, clock)

        return foreseeing


class SlowsTheClock(Tampering):
    """Has the clock that times run at half of its speed."""

    def modules(self, model: Any, notes: Notes) -> None:
        """While the model is loaded."""
        seconds, nanoseconds = time.perf_counter, time.perf_counter_ns
        replace_part(time, "perf_counter", lambda: seconds() / 2)
        replace_part(time, "perf_counter_ns", lambda: nanoseconds() // 2)


class SetsTheTime(Tampering):
    """Replaces the time of day alone."""

    def modules(self, model: Any, notes: Notes) -> None:
        """While the model is loaded."""
        replace_part(time, "time", lambda: 0.0)


class PraisesItself(Tampering):
    """Exchanges the code of a meter."""

    def modules(self, model: Any, notes: Notes) -> None:
        """Its weights take no memory then."""
        from optigpu.meters.base import Reading
        from optigpu.meters.memory import MemoryMeter

        def praising(*_: Any) -> Reading:
            return Reading({"weight_bytes": 1.0})

        replace_part(MemoryMeter, "read", praising)


class ReadsTheReference(Tampering):
    """Answers with anything when it is timed, and with the fp32 model's logits when its quality is looked at."""

    def loop(self, loop: Loop, model: Any, notes: Notes) -> Loop:
        """Its own `score` is the fp32 model's."""
        return TwoFaced(model)


class TwoFaced:
    """A loop whose tokens are made up, and whose logits are the model's own."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, prompt: Any, new_tokens: int, clock: Any) -> tuple[Any, list[Any]]:
        return made_up(prompt, new_tokens, clock)

    def score(self, tokens: Any, prefill: int) -> Iterator[Any]:
        """As the reference is made: by whole passes."""
        logits = self._model(input_ids=tokens).logits.float()
        return iter(logits[:, index] for index in range(prefill, tokens.shape[1]))


class MakesUpTokens(Tampering):
    """Computes nothing at all, for repeated prompts and fresh ones."""

    def loop(self, loop: Loop, model: Any, notes: Notes) -> Loop:
        """Numbers that look like tokens."""
        return made_up


class TellsHalf(Tampering):
    """Works honestly, and tells marks that lie half as far apart."""

    def loop(self, loop: Loop, model: Any, notes: Notes) -> Loop:
        """The tokens are right."""

        def telling(prompt: Any, new_tokens: int, clock: Any) -> tuple[Any, list[Any]]:
            tokens, marks = loop(prompt, new_tokens, clock)
            return tokens, [marks[0] + (mark - marks[0]) // 2 for mark in marks]

        return telling


class RestsThenHinders(Tampering):
    """Sleeps in the warm-up alone, and computes whenever it is asked nothing, to slow those that are timed then."""

    def loop(self, loop: Loop, model: Any, notes: Notes) -> Loop:
        """While requests are timed no garbage is collected, which tells a technique when it is watched."""
        asked_s = [time.monotonic()]
        threading.Thread(target=hinder, args=(asked_s,), daemon=True).start()

        def changeable(prompt: Any, new_tokens: int, clock: Any) -> tuple[Any, list[Any]]:
            if gc.isenabled():
                time.sleep(SLEEP_S)
            found = loop(prompt, new_tokens, clock)
            asked_s[0] = time.monotonic()
            return found

        return changeable


SLEEP_S = 0.5
AWAKE_AFTER_S = 2.0
"""So long after its last request it hinders others: no pause before the rounds is as long."""


def hinder(asked_s: list[float]) -> None:
    """Uses a core while nothing was asked for some time."""
    while True:
        if time.monotonic() - asked_s[0] < AWAKE_AFTER_S:
            time.sleep(0.05)


def made_up(prompt: Any, new_tokens: int, clock: Any) -> tuple[Any, list[Any]]:
    """Tokens that count up from a prompt's last one."""
    import torch

    marks = [clock.mark()]
    tokens = (prompt[:, -1:] + torch.arange(1, new_tokens + 1)) % 100
    for _ in range(new_tokens):
        time.sleep(1e-4)
        marks.append(clock.mark())
    return tokens, marks


REPLACED: list[tuple[Any, str, Any]] = []


def replace_part(owner: Any, name: str, value: Callable[..., Any]) -> None:
    """Replaces an attribute, so that `put_back` can undo it."""
    REPLACED.append((owner, name, getattr(owner, name)))
    setattr(owner, name, value)


LATE: list[threading.Thread] = []


def put_back() -> None:
    """Undoes what was replaced in this process, and waits for what still runs."""
    for thread in LATE:
        thread.join()
    while REPLACED:
        owner, name, before = REPLACED.pop()
        setattr(owner, name, before)


MODELS: list[Any] = []


def spoil(model: Any) -> None:
    """Puts a NaN into every matrix."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.view(-1)[0] = float("nan")
