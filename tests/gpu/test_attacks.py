"""Attacks that need a GPU: work on another stream than the one that is timed, and work that falls back to the CPU; and
kernels that are brought, honest and not."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

from optigpu.backends import BACKENDS
from optigpu.child.messages import Assignment, Ready
from optigpu.conductor.processes.child import ask
from optigpu.conductor.processes.rounds import TimedRounds
from optigpu.conductor.progress import JobProgress
from optigpu.conductor.verdicts.cost import Evidence
from optigpu.conductor.verdicts.disturbance import Goal, Yardstick
from optigpu.conductor.verdicts.host_monitor import HostMonitor
from optigpu.conductor.verdicts.judge import judge
from optigpu.documents.result import VerdictReason
from optigpu.hardware.probe import probe
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec
from optigpu.measure import Report
from optigpu.techniques.base import Loop, Notes
from optigpu.vocabulary import DeviceKind
from tests.engine.brought_kernels import HEAD, SLOW
from tests.engine.children import attacks
from tests.engine.children.attacks import Tampering
from tests.engine.children.tampered import tamper
from tests.engine.measuring import in_process
from tests.engine.test_kernels import measured as brought

pytestmark = pytest.mark.gpu
SPEC = JobSpec.model_validate(
    {
        "workload": {"kind": "generate", "prompt_tokens": 8, "new_tokens": 32},
        "model": "preset:tiny-llama-test",
        "device": "cuda",
        "measure": {"min_seconds": 1, "max_seconds": 30, "replicates": 1, "raise_priority": False},
    }
)


class OtherStream(Tampering):
    """Works on a stream of its own, while the marks are recorded on the usual one."""

    def loop(self, loop: Loop, model: Any, notes: Notes) -> Loop:
        """The copy of the tokens waits for the device, so that they are right."""
        stream = torch.cuda.Stream()

        def beside(prompt: Any, new_tokens: int, clock: Any) -> tuple[Any, list[Any]]:
            marks = [clock.mark() for _ in range(new_tokens + 1)]
            with torch.cuda.stream(stream):
                return loop(prompt, new_tokens, clock)[0], marks

        return beside


class FallsBack(Tampering):
    """Brings the model and its inputs to the CPU, and the logits back."""

    def modules(self, model: Any, notes: Notes) -> None:
        """While it is loaded."""
        honest = model.to("cpu").forward

        def falling(*given: Any, **named: Any) -> Any:
            given, named = tree_map_only(torch.Tensor, torch.Tensor.cpu, (given, named))
            found = honest(*given, **named)
            found.logits = found.logits.cuda()
            return found

        model.forward = falling


@pytest.mark.parametrize(
    ("attack", "found"),
    [(OtherStream, VerdictReason.CLOCK_CONTRADICTED), (FallsBack, VerdictReason.WRONG_DEVICE)],
)
def test_one_round_of_an_attack_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, attack: type[Tampering], found: VerdictReason
) -> None:
    """Work on another stream is in no mark and in the request; a model may fall back to the CPU."""
    monkeypatch.setattr(attacks, attack.__name__, attack, raising=False)
    monkeypatch.setattr(BACKENDS["torch"], "prepare", tamper(attack.__name__))
    (variant,) = variants_of(SPEC)
    assignment = Assignment(
        variant=variant, environment=probe(), measure=SPEC.measure, seed=0, replicate=0, folder=str(tmp_path)
    )
    progress = JobProgress(lambda _: None, lambda: None, [0], 1)
    monitor = HostMonitor(DeviceKind.CUDA, probe(), set)
    with in_process() as child:
        ready = ask(child, assignment, Ready, progress)
        rounds = TimedRounds(child, ready, assignment, monitor)
        rounds.measure_one(progress)
    replicate, goal = rounds.replicate(), Goal.of(SPEC.measure, ready.request_s)
    selection = replicate.selection(Yardstick(DeviceKind.CUDA), goal)
    assert found in judge(SPEC, variant, [Evidence(1, replicate, selection)], {}).reasons


TRITON = """
import torch
import triton
import triton.language as tl

INPUTS = [((512, 4096), (4096,))]


def reference(x, weight):
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


@triton.jit
def rms_norm(x, weight, y, width: tl.constexpr):
    at = tl.program_id(0) * width + tl.arange(0, width)
    row = tl.load(x + at)
    scale = 1 / tl.sqrt(tl.sum(row * row) / width + 1e-6)
    tl.store(y + at, row * scale * tl.load(weight + tl.arange(0, width)))


def custom(x, weight):
    y = torch.empty_like(x)
    rms_norm[(x.shape[0],)](x, weight, y, x.shape[1])
    return y
"""
ELSEWHERE = {
    "another stream": """
STREAM = torch.cuda.Stream()
def custom(x, weight):
    y = torch.empty(64, 384, device=x.device)
    with torch.cuda.stream(STREAM):
        y.copy_(slow(x, weight))
    return y
""",
    "events that tell a thousandth": """
torch.cuda.Event.elapsed_time = lambda self, other: 1e-3
custom = slow
""",
    "no synchronization": """
torch.cuda.synchronize = lambda *given: None
custom = slow
STREAM = torch.cuda.Stream()
torch.cuda.set_stream(STREAM)
""",
}


def test_a_triton_kernel_is_right_and_its_times_are(tmp_path: Path) -> None:
    reference, custom = brought(tmp_path, TRITON, device="cuda").results
    assert reference.facts.kernel is None
    assert custom.facts.kernel is not None
    assert custom.facts.kernel.error < custom.facts.kernel.tolerance
    assert VerdictReason.CLOCK_CONTRADICTED not in custom.verdict.reasons


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_kernel_gains_nothing_by_streams_and_events(tmp_path: Path, name: str) -> None:
    """Its answer may be read before it is there, which is wrong, or its time is not that of the answer."""
    report = brought(tmp_path, HEAD + SLOW + ELSEWHERE[name], device="cuda")
    reference, custom = report.outcomes
    assert reference.result is not None
    assert custom.result is None or not custom.result.verdict.valid or is_slow(report)


def is_slow(report: Report) -> bool:
    """Whether it says of itself that it takes the eight calls of the reference that it makes, about."""
    speedup = report.attribution.rows[1].speedup
    return speedup is not None and speedup.ratio < 0.5
