"""A device that speaks the protocol, seen from the runner: who it is, its input, its inferences."""

import re
from dataclasses import dataclass

from optigpu.edge.tiny.link import SILENCE_S, AnswerError, Link

INFER_SILENCE_S = 30.0
A_LINE = 31
"""Bytes of input in one command, as the open runner sends them."""
TRIES = 3
LAP_WRAP_US = 2**32
"""Devices print their microseconds as 32 bits."""


@dataclass(frozen=True)
class Identity:
    """What a device says of itself."""

    name: str
    firmware: str
    model: str


@dataclass(frozen=True)
class Inference:
    """`count` inferences: the device's own time for all of them, the host's beside it, and the last result."""

    count: int
    elapsed_us: int
    host_s: float
    results: tuple[float, ...]

    @property
    def per_second(self) -> float:
        return self.count / (self.elapsed_us / 1e6)


class Device:
    """Drives a device over a link. Methods raise TinyError."""

    def __init__(
        self, link: Link, silence_s: float = SILENCE_S, infer_silence_s: float = INFER_SILENCE_S
    ) -> None:
        self._link = link
        self._silence_s, self._infer_silence_s = silence_s, infer_silence_s

    def identify(self) -> Identity:
        """Waits for quiet and asks who is there; a few times, since half a command may be left in the device."""
        self._link.settle()
        for _ in range(TRIES):
            answer = self._link.ask("name", self._silence_s)
            if names := answer.found(r"m-name-dut-\[(.*)\]"):
                break
        else:
            raise AnswerError("The device does not say its name: its firmware speaks another protocol.")
        profile = self._link.ask("profile", self._silence_s)
        return Identity(
            name=names[0][0],
            firmware=profile.only(r"m-profile-\[(.*)\]", "its firmware"),
            model=profile.only(r"m-model-\[(.*)\]", "its model"),
        )

    def load(self, data: bytes) -> None:
        """Sends an input; again from its beginning if a line of it was garbled on the way."""
        why: str | None = None
        for _ in range(TRIES):
            why = self._load(data)
            if why is None:
                return
        raise AnswerError(f"An input of {len(data)} bytes cannot be loaded: {why}.")

    def _load(self, data: bytes) -> str | None:
        """Why it failed, if it did."""
        begun = self._link.ask(f"db load {len(data)}", self._silence_s)
        if begun.errors:
            return begun.errors[0]
        done = False
        for place in range(0, len(data), A_LINE):
            answer = self._link.ask(f"db {data[place : place + A_LINE].hex()}", self._silence_s)
            if answer.errors:
                return answer.errors[0]
            done = bool(answer.found("(m-load-done)"))
            if done and place + A_LINE < len(data):
                return f"the device says that it is complete after {place + A_LINE} bytes"
        return None if done else "the device does not say that it is complete"

    def buffer(self) -> bytes:
        answer = self._link.ask("db print", self._silence_s)
        rows = answer.found(r"m-buffer-([0-9a-fA-F]{2}(?:-[0-9a-fA-F]{2})*)")
        return bytes.fromhex("".join(row.replace("-", "") for row, _ in rows))

    def infer(self, count: int, warmup: int, expected_s: float = 0.0) -> Inference:
        """Runs the model `count` times after a warm-up; `expected_s` is how long it will take, as far as is known."""
        answer = self._link.ask(f"infer {count} {warmup}", self._infer_silence_s + 2 * expected_s)
        if answer.errors:
            raise AnswerError(f"The device cannot infer: {answer.errors[0]}.")
        begun = [text for text, _ in answer.found(r"m-infer-start-(\d+)")]
        if list(map(int, begun)) != [count]:
            said = " and ".join(begun) or "none"
            raise AnswerError(f"The device was asked for {count} inferences and began {said}.")
        answer.only("m-(infer-done)", "the end of the inferences")
        laps = answer.found(r"m-lap-us-(\d{1,20})")
        if not laps:
            raise AnswerError(
                "The device gives no times: it is in energy mode, or its firmware is built for it."
            )
        if len(laps) != 2:
            raise AnswerError(f"An inference has two times; the device gave {len(laps)}.")
        elapsed_us = (int(laps[1][0]) - int(laps[0][0])) % LAP_WRAP_US
        if elapsed_us == 0:
            raise AnswerError(f"The device took no time for {count} inferences: its clock stands still.")
        results = numbers(answer.only(r"m-results-\[(.*)\]", "results"))
        return Inference(count, elapsed_us, laps[1][1] - laps[0][1], results)


def numbers(text: str) -> tuple[float, ...]:
    """The numbers of a result. Raises AnswerError for what is none."""
    found = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch(r"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?", word) for word in found):
        raise AnswerError(f"The device's result is no list of numbers: {text[:60]}.")
    return tuple(map(float, found))
