"""`make demo`: GPT-2 through a ladder of optimizations and a matrix product, measured by a service on this machine.

It starts the embedded service, calls it over HTTP, prints the results, and stops what it started.
"""

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import httpx
from rich.console import Console

from examples.service import embedded_service
from optigpu.cli.options import parse_stack
from optigpu.client import Client
from optigpu.conductor.proof import prove
from optigpu.documents.result import Attribution, Environment
from optigpu.documents.views import EventView, JobView
from optigpu.hardware import probe
from optigpu.http_clients import http_client
from optigpu.job.plan import default_beside, default_stack
from optigpu.job.spec import JobSpec
from optigpu.paths import data_dir, without_home
from optigpu.report import RunProgress, console, job_title, ladder_grid, leaderboard_grids, terminal
from optigpu.report.charts import CHARTS
from optigpu.techniques import TECHNIQUES
from optigpu.techniques.base import Phase
from optigpu.vocabulary import DeviceKind, JobState, OptiGPUError
from optigpu.workloads import WORKLOADS

GENERATE = {"kind": "generate", "prompt_tokens": 32, "new_tokens": 16, "batch_size": 1}
MEASURE = {"replicates": 1, "min_seconds": 2, "max_seconds": 20, "rel_ci": 0.2}
"""Short: a wide interval will do, and a slow machine still gets the 24 requests that one process needs for it."""
MEASURE_PRODUCT = {"replicates": 1, "min_seconds": 1, "max_seconds": 5, "rel_ci": 0.1}
LIMITS = {"wait_for_quiet_s": 5}
SLOW_AND_ALREADY_THERE = {"fused_attention"}
"""The baseline has it already, and its reference would cost a minute of the demo; `optigpu ladder` measures it."""
CHART = "demo.svg"


def main() -> int:
    """Runs the demo; the exit status is 0 when both jobs succeeded."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument("--model", default="preset:gpt2", help="default: preset:gpt2")
    parser.add_argument("--stack", help="techniques, separated by commas; default: what suits this machine")
    options = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    interruption = Interruption()
    signal.signal(signal.SIGINT, interruption)
    screen = console()
    try:
        return _demo(screen, data_dir(), options, interruption)
    except KeyboardInterrupt:
        screen.print("\nStopped; nothing is left running.")
        return 130
    except OptiGPUError as error:
        screen.print(f"The demo failed: {error}", markup=False)
        return 1


class Interruption:
    """Ctrl-C, remembered: Python drops an exception that is raised while it forks or collects garbage."""

    def __init__(self) -> None:
        self._asked = False

    def __call__(self, number: int, _: Any) -> NoReturn:
        """The signal's handler."""
        self._asked = True
        raise KeyboardInterrupt

    def check(self) -> None:
        """Raises KeyboardInterrupt if Ctrl-C was pressed."""
        if self._asked:
            raise KeyboardInterrupt


def _leave(number: int, _: Any) -> NoReturn:
    raise SystemExit(128 + number)


def _demo(screen: Console, folder: Path, options: argparse.Namespace, interruption: Interruption) -> int:
    environment = probe()
    device = DeviceKind.CUDA if environment.has(DeviceKind.CUDA) else DeviceKind.CPU
    screen.print(f"This machine: {environment.hardware_class}", markup=False)
    if device is DeviceKind.CUDA:
        prove(
            device, cancelled=lambda: None
        )  # no worker starts on a GPU that does not work, and the jobs would wait
    with embedded_service(folder / "demo.log") as url, Client(url) as client:
        screen.print(
            f"The service listens on {url}; its log is {without_home(str(folder / 'demo.log'))}", markup=False
        )
        stack = parse_stack(options.stack) if options.stack else suitable_stack(environment, device)
        documents = matmul_spec(device), ladder_spec(options.model, device, stack)
        specs = [JobSpec.model_validate(document) for document in documents]
        jobs = _measure(screen, client, specs, interruption)
        for grid in leaderboard_grids(client.leaderboard(workload="generate", limit=10)):
            screen.print(terminal(grid))
        drawn = _draw(client, jobs[-1], folder / CHART)
    for line in _ending(folder, options.model, drawn):
        screen.print(line, markup=False, highlight=False)
    return 0 if all(job.state is JobState.SUCCEEDED for job in jobs) else 1


def _draw(client: Client, job: JobView, path: Path) -> bool:
    """The ladder's chart; False where there is nothing to draw."""
    results = client.results(job.id)
    if not any(result["metrics"][result["variant"]["primary_metric"]]["value"] for result in results):
        return False
    CHARTS["ladder"](job_title(job.spec, results), results, path)
    return True


def _ending(folder: Path, model: str, drawn: bool) -> Iterator[str]:
    """Where everything lies, and what to do next."""
    yield f"The results are in {without_home(str(folder / 'optigpu.db'))}."
    if drawn:
        yield f"The chart is {without_home(str(folder / CHART))}."
    yield "Next:"
    for command, why in (
        ("make serve", "show these results as a service"),
        (f".venv/bin/optigpu ladder --model {model}", "measure three processes of each"),
        (
            ".venv/bin/optigpu ladder --model bundled:tiny",
            "measure a trained model, with its loss of quality",
        ),
    ):
        yield f"  {command:<55}  {why}"


def suitable_stack(environment: Environment, device: DeviceKind) -> list[dict[str, str]]:
    """The techniques that suit this machine, as a job names them, without those that another one brings along.

    Without a compiler torch_compile stays among them: its rungs then say what is missing.
    """
    workload = WORKLOADS["generate"].model_validate(GENERATE)
    as_if_compiler = environment.model_copy(update={"compiler": environment.compiler or "none"})
    techniques = default_stack(as_if_compiler, device, workload, "torch")
    left_out = SLOW_AND_ALREADY_THERE.union(*(each.requires for each in techniques))
    return [{"name": each.name} for each in techniques if each.name not in left_out]


def ladder_spec(model: str, device: DeviceKind, stack: list[dict[str, str]]) -> dict[str, Any]:
    """The baseline, the ladder of what needs no compiling, and beside it the whole stack and what excludes it.

    Each compiled variant takes half a minute, so that only one is measured.
    """
    workload = WORKLOADS["generate"].model_validate(GENERATE)
    quick = [each for each in stack if TECHNIQUES[each["name"]].phase is not Phase.COMPILATION]
    others = default_beside(probe(), device, workload, "torch", model)
    return {
        "workload": GENERATE,
        "model": model,
        "device": device,
        "stack": quick,
        "plan": "ladder",
        "beside": [{"stack": stack}, *(each.model_dump(mode="json") for each in others)],
        "measure": MEASURE,
        "limits": LIMITS,
        "fresh": True,
    }


def matmul_spec(device: DeviceKind) -> dict[str, Any]:
    """Two small matrix products in fp32: the first result comes soon."""
    workload = {"kind": "matmul", "sizes": [256, 512]}
    return {
        "workload": workload,
        "device": device,
        "measure": MEASURE_PRODUCT,
        "limits": LIMITS,
        "fresh": True,
    }


def _measure(
    screen: Console, client: Client, specs: list[JobSpec], interruption: Interruption
) -> list[JobView]:
    """Posts the jobs and follows each to its end; cancels them when it has to leave early."""
    interruption.check()
    jobs = [client.submit(spec) for spec in specs]
    ahead = (client.job(jobs[0].id).queue_position or 1) - 1
    if ahead:
        screen.print(f"{ahead} jobs that were already queued in this database are measured first.")
    try:
        return [_follow(screen, client, job, interruption) for job in jobs]
    except BaseException:
        for job in jobs:
            with suppress(httpx.HTTPError), http_client(client.base_url, timeout=2) as http:
                http.post(f"/v1/jobs/{job.id}/cancel")
        raise


def _follow(screen: Console, client: Client, job: JobView, interruption: Interruption) -> JobView:
    screen.print(f"\nPOST /v1/jobs -> job {job.id}: {job.workload}, {job.plan}", markup=False)
    with RunProgress(screen) as progress:

        def show(event: EventView) -> None:
            interruption.check()
            progress.show(event.kind, event.data)

        job = client.wait(job.id, show)
    if job.attribution:
        results = client.results(job.id)
        attribution = Attribution.model_validate(job.attribution, extra="ignore")
        screen.print(terminal(ladder_grid(job_title(job.spec, results), attribution, results)))
    if job.state is not JobState.SUCCEEDED:
        screen.print(f"The job {job.state}: {job.reason}", markup=False)
    return job


if __name__ == "__main__":
    sys.exit(main())
