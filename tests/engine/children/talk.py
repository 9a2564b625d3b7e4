"""The protocol of optigpu.child.messages from the child's side, in the standard library alone: children start fast."""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

READY = {
    "kind": "ready",
    "load_s": 0.5,
    "compile_s": None,
    "steady": True,
    "warmup_requests": 3,
    "request_s": 0.001,
}


def descriptor() -> int:
    """Of the answers' pipe."""
    return int(sys.argv[sys.argv.index("--answers-fd") + 1])


def write(data: bytes) -> None:
    """Bytes on the answers' pipe, all of them."""
    while data:
        data = data[os.write(descriptor(), data) :]


def say(kind: str, **fields: Any) -> None:
    """One answer."""
    write(json.dumps({"kind": kind, **fields}).encode() + b"\n")


WAITS: list[bool] = []
"""Whether the last assignment asked to wait."""


def ready(look: float = 10.0, **fields: Any) -> None:
    """The answer to the assignment, after short requests of `look` tokens/s if it asked to wait."""
    if WAITS and WAITS[-1]:
        say("loaded")
        while (command := hear())["kind"] != "run_warm_up":
            answer(command, look)
    say(**{**READY, **fields})


def hear(*, raw: bool = False) -> dict[str, Any]:
    """The next message; a `Begin` is answered here, unless `raw`. Ends the process where there is none."""
    line = sys.stdin.readline()
    if not line:
        sys.exit(0)
    heard: dict[str, Any] = json.loads(line)
    if heard["kind"] == "begin" and not raw:
        say("started")
        return hear()
    if heard["kind"] == "assignment":
        WAITS.append(heard["waits"])
    return heard


def samples(tokens_per_s: float, count: int) -> dict[str, list[float]]:
    """A round of a generate workload: the same number with a small ripple."""
    rates = [tokens_per_s * (1 + 0.001 * (index % 5 - 2)) for index in range(count)]
    return {
        "tokens_per_s": rates,
        "tpot_s": [1 / rate for rate in rates],
        "ttft_s": [2 / rate for rate in rates],
        "latency_s": [10 / rate for rate in rates],
        "requests_per_s": [rate / 10 for rate in rates],
    }


def obey(tokens_per_s: float, before: Callable[[str], None] = lambda _: None, **ready_fields: Any) -> None:
    """Does everything that it is asked for, until its stdin closes; calls `before` with the kind of each command."""
    ready(look=tokens_per_s, **ready_fields)
    while True:
        command = hear()
        before(command["kind"])
        answer(command, tokens_per_s)


def answer(command: dict[str, Any], tokens_per_s: float) -> None:
    """What a process that decodes so fast says."""
    match command["kind"]:
        case "run_look":
            say("round", samples=samples(tokens_per_s, 1))
        case "run_round":
            say("round", samples=samples(tokens_per_s, max(command["min_requests"], 20)))
        case "run_audit":
            say("audited", samples=samples(tokens_per_s, command["requests"]))
        case _:
            values, reasons = {"weight_bytes": 4e6}, {"peak_bytes": "no GPU"}
            say("metered", meter=command["meter"], values=values, reasons=reasons)
