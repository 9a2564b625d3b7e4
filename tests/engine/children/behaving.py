"""Measuring processes that behave well and badly: the first argument names which, those after it are the function's."""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from itertools import cycle, islice
from pathlib import Path

from tests.engine.children import talk


def well_behaved() -> None:
    """Measures as it should: 10 tokens/s for the plain model, 10 more for each technique; says where it runs."""
    assignment = talk.hear()
    techniques = len(assignment["variant"]["stack"])
    talk.say("progress", doing="loading")
    print("what a model prints")
    talk.obey(
        tokens_per_s=10.0 * (1 + techniques) + 0.01 * assignment["replicate"],
        compile_s=None if techniques == 0 else 1.5,
        facts={"recorded": {"pid": os.getpid(), "variables": dict(os.environ)}},
    )


def drifting() -> None:
    """As well_behaved, on a machine that is twice as fast in the second replicate as in the first."""
    assignment = talk.hear()
    techniques = len(assignment["variant"]["stack"])
    talk.obey(tokens_per_s=10.0 * (1 + techniques) * (1 + assignment["replicate"]))


def operators() -> None:
    """Times attention as it should: 1 GFLOP/s for the standard implementation, and 2 for the fused one."""
    (implementation,) = talk.hear()["variant"]["workload"]["implementations"]
    tflops = 0.002 if implementation == "fused" else 0.001
    talk.ready()
    while True:
        command = talk.hear()
        count = max(command.get("min_requests", 0), command.get("requests", 0), 20)
        rates = [tflops * (1 + 0.001 * (number % 5 - 2)) for number in range(count)]
        samples = {"tflops": rates, "latency_s": [1 / rate for rate in rates]}
        talk.say("round" if command["kind"] == "run_round" else "audited", samples=samples)


def erratic(request_s: str) -> None:
    """Never settles: every second request is twice as fast. Gives just as many requests as it must.

    `request_s` is how long it says that a request takes.
    """
    talk.hear()
    talk.ready(request_s=float(request_s))
    rates = cycle([10.0, 20.0])
    while True:
        command = talk.hear()
        if command["kind"] == "run_round":
            time.sleep(min(command["seconds"], 0.05))
            given = [talk.samples(rate, 1) for rate in islice(rates, command["min_requests"])]
            talk.say("round", samples={name: [request[name][0] for request in given] for name in given[0]})
        elif command["kind"] == "run_audit":
            talk.say("audited", samples=talk.samples(15.0, command["requests"]))
        else:
            talk.say("metered", meter=command["meter"])


def noted(path: str) -> None:
    """Measures as it should, and notes in a file what it was told before its first round."""

    def note(kind: str) -> None:
        with Path(path).open("a") as notes:
            notes.write(kind + "\n")

    note(talk.hear(raw=True)["kind"])
    talk.say("started")
    note(talk.hear()["kind"])
    talk.obey(tokens_per_s=10.0)


def peaking(path: str) -> None:
    """Answers with invented peaks, and appends one line for each request to a file.

    The rates of products are 10^9 at the first request and double with each.
    """
    order = talk.hear()
    with Path(path).open("a+") as asked:
        asked.write("asked\n")
        asked.seek(0)
        times = len(asked.readlines())
    talk.say(
        "peaks",
        device=order["device"],
        threads=order["threads"],
        measured_at=datetime.now(UTC).isoformat(),
        torch="2.13.0",
        reads=[{"array_bytes": 2**20, "bytes_per_s": 1e9}],
        copy_bytes_per_s=1e9,
        matmul_flops_per_s={"float32": 2 ** (times - 1) * 1e9},
    )
    talk.hear()


def batches(bound: str, how: str) -> None:
    """Tries batches as optigpu.child.largest_batch does: those up to `bound` fit. A larger one ends it, or with
    "recovers" runs out of memory; with "hangs" it never answers.
    """
    talk.hear()
    talk.say("batches_ready", facts={"recorded": {"loaded": True}})
    while True:
        batch = talk.hear()["batch_size"]
        if how == "hangs":
            talk.say("progress", doing="hanging")
            time.sleep(600)
        if batch <= int(bound):
            talk.say("batch_tried", fits=True)
        elif how == "recovers":
            talk.say("batch_tried", fits=False, why="too much")
        else:
            sys.exit(1)


def moody() -> None:
    """Behaves by what its stack holds: refuses, breaks, runs out of memory, gives an invalid output, never settles."""
    match [technique["name"] for technique in talk.hear()["variant"]["stack"]]:
        case ["bf16"]:
            talk.say("refused", reason="no bf16 here\x00")
        case ["fp16"]:
            talk.say("broken", fault="error", reason="a layer is missing", trace="Traceback ...")
        case ["no_kv_cache"]:
            talk.say("broken", fault="out_of_memory", reason="8 GB were asked for")
        case ["eager_attention"]:
            talk.obey(tokens_per_s=1000.0, problem="3 of 8 tokens")
        case ["static_kv_cache"]:
            talk.obey(tokens_per_s=20.0, steady=False)
    talk.obey(tokens_per_s=10.0)


def chatty() -> None:
    """Prints and answers more than any pipe holds, before it reads a word."""
    for _ in range(64):
        sys.stderr.write("e" * 2**16)
        sys.stdout.write("o" * 2**16)
        talk.say("progress", doing="p" * 2**16)
    talk.hear()
    talk.obey(tokens_per_s=10.0)


def hanging() -> None:
    """Says nothing more after the assignment of a variant with techniques; ends when its stdin closes."""
    if talk.hear()["variant"]["stack"]:
        talk.say("progress", doing="hanging")
        talk.hear()
    talk.obey(tokens_per_s=10.0)


def pausing(replicate: str, kind: str) -> None:
    """As well_behaved, until a message of this kind in this replicate of each variant with techniques: then silent."""
    assignment = talk.hear()
    pauses = assignment["replicate"] == int(replicate) and bool(assignment["variant"]["stack"])

    def pause_at(command: str) -> None:
        if pauses and command == kind:
            talk.say("progress", doing="hanging")
            talk.hear()

    pause_at("assignment")
    talk.obey(tokens_per_s=10.0, before=pause_at)


def restless(seconds: str) -> None:
    """As well_behaved; a thread of each variant with techniques computes on for so long after it has answered."""
    is_restless = bool(talk.hear()["variant"]["stack"])

    def compute() -> None:
        until = time.monotonic() + float(seconds)
        while time.monotonic() < until:
            pass

    def begin_to(command: str) -> None:
        if is_restless and command == "run_round":
            threading.Thread(target=compute).start()

    talk.obey(tokens_per_s=10.0, before=begin_to)


def mortal(last: str) -> None:
    """As well_behaved; each variant with techniques dies at the command of that number, from 1."""
    is_mortal = bool(talk.hear()["variant"]["stack"])
    heard: list[str] = []

    def count(command: str) -> None:
        heard.append(command)
        if is_mortal and len(heard) == int(last):
            os._exit(3)

    talk.obey(tokens_per_s=10.0, before=count)


def dying(how: str, first: str, counter: str = "-") -> None:
    """Dies in the middle of a round, from the replicate `first` on: with a status, or by a signal.

    `counter` is a file whose count it raises before, as the kernel counts whom it kills for memory.
    """
    if talk.hear()["replicate"] >= int(first):
        talk.ready()
        talk.hear()
        talk.write(b'{"kind": "round", "samp')
        print("last words", file=sys.stderr, flush=True)
        if counter != "-":
            Path(counter).write_text("oom_kill 8\n")
        if how.isdigit():
            os._exit(int(how))
        os.kill(os.getpid(), signal.Signals[how])
    talk.obey(tokens_per_s=10.0)


def crashing(doing: str, kept: str = "") -> None:
    """Says that it does this, notes that it reads a kept model, and crashes."""
    from optigpu.backends.converted import note_use

    folder = Path(talk.hear()["folder"])
    talk.say("progress", doing=doing)
    if kept:
        note_use(folder, Path(kept))
    print("last words", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGABRT)


def garbage(kind: str) -> None:
    """Answers with what is no message."""
    talk.hear()
    print("the model\x00 said: \x1b[31mhelp", file=sys.stderr)
    answers = {
        "text": b"Segmentation fault\n",
        "binary": b"\x00\xff\xfe{}\n",
        "unknown": b'{"kind": "surprise"}\n',
        "nan": b'{"kind": "round", "samples": {"tokens_per_s": [NaN]}}\n',
        "endless": b"x" * 4096,
    }
    if kind in answers:
        talk.write(answers[kind])
    else:
        talk.ready()
        talk.hear()
        rounds = {
            "empty": talk.samples(1.0, 0),
            "zero": talk.samples(1.0, 3) | {"tokens_per_s": [1.0, 0.0, 1.0]},
        }
        talk.say("round", samples=rounds[kind])
    talk.hear()


def unproven(how: str, error: str = "") -> None:
    """Answers the order of a proof in this way; `error` is the text of an error."""
    talk.hear()
    match how:
        case "breaks":
            talk.say("broken", fault="error", reason=error)
        case "has_no_memory":
            talk.say("broken", fault="out_of_memory", reason=error)
        case "dies":
            lines = "Traceback (most recent call last):\nImportError: libcudart.so.13"
            print(lines, file=sys.stderr, flush=True)
            os._exit(3)
    talk.hear()


def telling() -> None:
    """Fails with what it sees of its environment."""
    talk.hear()
    threads = os.environ["OMP_NUM_THREADS"]
    secret = os.environ.get("OPTIGPU_API_KEY")
    talk.say("broken", fault="error", reason=f"secret: {secret}, threads: {threads}")


def deaf(path: str) -> None:
    """Ignores the end of its stdin and every signal that can be ignored, and writes its process id to a file."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    talk.hear()
    Path(path).write_text(str(os.getpid()))
    talk.say("progress", doing="deaf")
    while True:
        time.sleep(3600)


def interrupted(path: str) -> None:
    """Notes its process id, and whether an interrupt reaches it, in a folder; ends when its stdin closes."""
    folder = Path(path)
    signal.signal(signal.SIGINT, lambda *_: (folder / "interrupted").touch())
    talk.hear()
    (folder / "pid.new").write_text(str(os.getpid()))
    (folder / "pid.new").rename(folder / "pid")
    talk.hear()


def parent(path: str, how: str) -> None:
    """Starts processes that would outlive it: one in its own group, one in a separate group, and one that keeps the
    answers' pipe open; writes their ids to a file; then dies or obeys.
    """
    talk.hear()
    sleep = ["sleep", "3600"]
    started = [
        subprocess.Popen(sleep),
        subprocess.Popen(sleep, process_group=0),
        subprocess.Popen(sleep, pass_fds=(talk.descriptor(),)),
    ]
    Path(path).write_text(" ".join(str(process.pid) for process in started))
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    talk.obey(tokens_per_s=10.0)


def hungry(group: str) -> None:
    """Joins the control group with this `cgroup.procs`, and takes memory until the kernel kills it."""
    talk.hear()
    Path(group).write_text(str(os.getpid()))
    taken = []
    while True:
        taken.append(bytearray(os.urandom(2**20)))


def confined_facts(port: str) -> None:
    """Says how it is confined: as the text of a progress message, since it measures nothing."""
    from optigpu.child import confined

    def reaches(where: int) -> bool:
        """Whether something listens at that port of loopback, as this process sees it."""
        with suppress(OSError), socket.create_connection(("127.0.0.1", where), timeout=5):
            return True
        return False

    def can_write(size: int) -> bool:
        with suppress(OSError), tempfile.NamedTemporaryFile() as file:
            file.truncate(size)
            return True
        return False

    largest = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    with socket.create_server(("127.0.0.1", 0)) as own:
        (Path(tempfile.gettempdir()) / "left").write_text("behind")
        found = {
            "reach": confined.reach(),
            "reaches_the_host": reaches(int(port)),
            "reaches_itself": reaches(own.getsockname()[1]),
            "core": resource.getrlimit(resource.RLIMIT_CORE),
            "files": resource.getrlimit(resource.RLIMIT_NOFILE)[1],
            "largest_file": largest,
            "can_write_more": can_write(largest + 1),
            "temporary": tempfile.gettempdir(),
            "user": [os.getuid(), os.getgid()],
        }
    talk.hear()
    talk.say("progress", doing=json.dumps(found))
    talk.hear()


def conductor(path: str, child: str, *arguments: str) -> None:
    """Not a child but its parent, as a separate process: runs a job in a folder with another of these."""
    from optigpu.job.spec import JobSpec
    from optigpu.measure import run
    from tests.engine.processes import program

    spec = {
        "workload": {"kind": "generate"},
        "model": "preset:tiny-llama-test",
        "limits": {"wait_for_quiet_s": 0},
    }
    run(
        JobSpec.model_validate(spec),
        lambda _: None,
        lock_dir=Path(path) / "locks",
        program=program(child, *arguments),
    )


if __name__ == "__main__":
    name, *given = sys.argv[1:]
    if "--answers-fd" in given:
        given = given[: given.index("--answers-fd")]
    behave: Callable[..., None] = globals()[name]
    behave(*given)
