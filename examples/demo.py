"""`make demo`: a model through a ladder of optimizations, measured by a service on this machine.

The model is SmolLM2-135M, or GPT-2's shapes with random weights where it cannot be had. The demo starts the embedded
service, calls it over HTTP, prints speed, bytes, loss of quality and a continued sentence of each stack, and stops what
it started.
"""

import argparse
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from textwrap import shorten
from typing import Any

import httpx
from rich.console import Console

from examples.service import embedded_service
from optigpu.cli.options import parse_stack
from optigpu.client import Client
from optigpu.conductor.tasks import prove
from optigpu.documents.result import Attribution, Environment
from optigpu.documents.views import EventView, JobView
from optigpu.hardware import probe
from optigpu.http_clients import http_client
from optigpu.job.plan import default_beside, default_stack
from optigpu.job.spec import JobSpec
from optigpu.models.bring import Watch, bring
from optigpu.models.reference import TRAINED, parse_reference, preset_of
from optigpu.paths import data_dir, without_home
from optigpu.report.catalog import job_title
from optigpu.report.charts import CHARTS, Report, write_picture
from optigpu.report.formats import console, terminal
from optigpu.report.ladder import WIDTH, brief_grid
from optigpu.report.progress import RunProgress, ShareProgress
from optigpu.techniques import TECHNIQUES
from optigpu.techniques.base import Phase
from optigpu.vocabulary import DeviceKind, Document, JobState, OptiGPUError
from optigpu.workloads import WORKLOADS

REAL, SHAPES = TRAINED["smollm2-135m"], "preset:gpt2"
"""The model, and what takes its place where it cannot be had."""
PROMPT = "The capital of France is"
RANDOM_IDS = {"kind": "generate", "prompt_tokens": 32, "new_tokens": 16}
"""For a model with random weights, which has no words."""
MEASURE = {"replicates": 1, "min_seconds": 2, "max_seconds": 20, "rel_ci": 0.2, "quality": {"tokens": 128}}
"""Short: a wide interval will do, and a slow machine still gets the 24 requests that one process needs for it."""
LIMITS = {"wait_for_quiet_s": 5}
SLOW_AND_ALREADY_THERE = {"fused_attention"}
"""The baseline has it already, and its reference would cost a minute of the demo; `optigpu ladder` measures it."""
CHART = "demo.svg"


def main() -> int:
    """Runs the demo; the exit status is 0 when the job succeeded."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument("--model", help=f"default: path:{REAL.name}, or {SHAPES} where it cannot be had")
    parser.add_argument("--stack", help="techniques, separated by commas; default: what suits this machine")
    options = parser.parse_args()
    interruption = Interruption()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interruption)
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
    """The signal to end, remembered: Python drops an exception that is raised while it forks or collects garbage."""

    def __init__(self) -> None:
        self._asked: int | None = None

    def __call__(self, number: int, _: Any) -> None:
        """The signals' handler."""
        self._asked = number
        self.check()

    def check(self) -> None:
        """Raises KeyboardInterrupt after Ctrl-C, and SystemExit after another signal to end."""
        if self._asked == signal.SIGINT:
            raise KeyboardInterrupt
        if self._asked is not None:
            raise SystemExit(128 + self._asked)


def _demo(screen: Console, folder: Path, options: argparse.Namespace, interruption: Interruption) -> int:
    environment = probe()
    device = DeviceKind.CUDA if environment.has(DeviceKind.CUDA) else DeviceKind.CPU
    screen.print(f"This machine: {environment.hardware_class}", markup=False)
    if device is DeviceKind.CUDA:
        prove(
            device, cancelled=lambda: None
        )  # no worker starts on a GPU that does not work, and the jobs would wait
    model = options.model or _brought(screen, interruption)
    workload = workload_for(model)
    with embedded_service(folder / "demo.log") as url, Client(url) as client:
        screen.print(
            f"The service listens on {url}; its log is {without_home(str(folder / 'demo.log'))}", markup=False
        )
        stack = parse_stack(options.stack) if options.stack else suitable_stack(environment, device, workload)
        spec = JobSpec.model_validate(ladder_spec(model, device, stack, workload))
        job = _measure(screen, client, spec, interruption)
        results = client.results(job.id)
        for line in continuations(results):
            screen.print(line, markup=False, highlight=False)
        drawn = _draw(job, results, folder / CHART)
    for line in _ending(folder, model, drawn):
        screen.print(line, markup=False, highlight=False)
    return 0 if job.state is JobState.SUCCEEDED else 1


def _brought(screen: Console, interruption: Interruption) -> str:
    """The reference of the model, which is brought where it is not there yet."""
    try:
        with ShareProgress(screen) as progress:
            bring(REAL, Watch(progress.show, interruption.check))
    except OptiGPUError as error:
        screen.print(f"{error} Until then: {SHAPES}, with random weights.", markup=False)
        return SHAPES
    return f"path:{REAL.name}"


def workload_for(model: str) -> dict[str, Any]:
    """What is decoded: a sentence, or random ids by a model that knows no words."""
    if preset_of(parse_reference(model)):
        return RANDOM_IDS
    return {"kind": "generate", "prompt": PROMPT, "new_tokens": RANDOM_IDS["new_tokens"]}


def continuations(results: Sequence[Document]) -> Iterator[str]:
    """How each variant went on from the prompt; nothing where none read a text."""
    said = {
        result["variant"]["label"]: " ".join(result["facts"]["recorded"]["output_text"].split())
        for result in results
        if "output_text" in result["facts"]["recorded"]
    }
    if said:
        yield f"{PROMPT} ..."
    for label, text in said.items():
        yield "  " + shorten(f"{label}: ... {text}", WIDTH - 2, placeholder=" ...")


def _draw(job: JobView, results: Sequence[Document], path: Path) -> bool:
    """The ladder's chart; False where there is nothing to draw."""
    if not any(result["metrics"][result["variant"]["primary_metric"]]["value"] for result in results):
        return False
    write_picture(CHARTS["ladder"](Report(job_title(job.spec, results), results)), path)
    return True


def _ending(folder: Path, model: str, drawn: bool) -> Iterator[str]:
    """Where everything lies, and what to do next."""
    yield f"The results are in {without_home(str(folder / 'optigpu.db'))}."
    if drawn:
        yield f"The chart is {without_home(str(folder / CHART))}."
    yield "Next:"
    more = (
        ".venv/bin/optigpu ladder --model bundled:tiny",
        "measure a trained model, with its loss of quality",
    )
    for command, why in (
        ("make serve", "show these results as a service"),
        (
            f".venv/bin/optigpu ladder --model {model}",
            "measure what suits this machine, in about two minutes",
        ),
        more if model == SHAPES else (".venv/bin/optigpu models", "list the models that there are"),
    ):
        yield f"  {command:<55}  {why}"


def suitable_stack(
    environment: Environment, device: DeviceKind, asked: dict[str, Any]
) -> list[dict[str, str]]:
    """The techniques that suit this machine, as a job names them, without those that another one brings along.

    Without a compiler torch_compile stays among them: its rungs then say what is missing.
    """
    workload = WORKLOADS["generate"].model_validate(asked)
    as_if_compiler = environment.model_copy(update={"compiler": environment.compiler or "none"})
    techniques = default_stack(as_if_compiler, device, workload, "torch")
    left_out = SLOW_AND_ALREADY_THERE.union(*(each.requires for each in techniques))
    return [{"name": each.name} for each in techniques if each.name not in left_out]


def ladder_spec(
    model: str, device: DeviceKind, stack: list[dict[str, str]], asked: dict[str, Any]
) -> dict[str, Any]:
    """The baseline, the ladder of what needs no compiling, and beside it the whole stack and what excludes it.

    Each compiled variant takes half a minute, so that only one is measured.
    """
    workload = WORKLOADS["generate"].model_validate(asked)
    quick = [each for each in stack if TECHNIQUES[each["name"]].phase is not Phase.COMPILATION]
    others = default_beside(probe(), device, workload, "torch", model)
    return {
        "workload": asked,
        "model": model,
        "device": device,
        "stack": quick,
        "plan": "ladder",
        "beside": [{"stack": stack}, *(each.model_dump(mode="json") for each in others)],
        "measure": MEASURE,
        "limits": LIMITS,
        "fresh": True,
    }


def _measure(screen: Console, client: Client, spec: JobSpec, interruption: Interruption) -> JobView:
    """Posts the job and follows it to its end; cancels it when it has to leave early."""
    interruption.check()
    job = client.submit(spec)
    ahead = (client.job(job.id).queue_position or 1) - 1
    if ahead:
        screen.print(f"{ahead} jobs that were already queued in this database are measured first.")
    try:
        return _follow(screen, client, job, interruption)
    except BaseException:
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
        screen.print(terminal(brief_grid(job_title(job.spec, results), attribution, results)))
    if job.state is not JobState.SUCCEEDED:
        screen.print(f"The job {job.state}: {job.reason}", markup=False)
    return job


if __name__ == "__main__":
    sys.exit(main())
