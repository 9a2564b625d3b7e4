"""recommend_optimization: the decision guide, corrected by what was measured on this machine."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from math import isfinite
from typing import TypeVar

from optigpu.facade.decision_guide import (
    GUIDE,
    Advice,
    GuideHardware,
    GuideTask,
    Scenario,
    advice_for,
)
from optigpu.facade.indexed import Indexed
from optigpu.runs import KeptRun, kept_runs
from optigpu.statistics.intervals import Bounds
from optigpu.techniques import TECHNIQUES
from optigpu.techniques.base import Basis
from optigpu.vocabulary import SpecError, Task
from optigpu.workloads import WORKLOADS

Choice = TypeVar("Choice", bound=StrEnum)
_TRUST = (Basis.MEASURED, Basis.LITERATURE, Basis.ARITHMETIC, Basis.AIM)
"""What an effect may rest on, the best first."""


@dataclass(frozen=True)
class MeasuredGain:
    """What a technique bought alone in the newest kept run that measured it: how many times better `metric` became."""

    technique: str
    ratio: float
    ci: Bounds | None
    metric: str
    model: str
    hardware: str
    run_id: str

    @property
    def is_slower(self) -> bool:
        """Whether the whole interval is below 1."""
        return self.ci is not None and self.ci[1] < 1

    @property
    def is_faster(self) -> bool:
        """Whether the whole interval is above 1."""
        return self.ci is not None and self.ci[0] > 1

    def __str__(self) -> str:
        bounds = f" [{self.ci[0]:.2f}, {self.ci[1]:.2f}]" if self.ci else ""
        return f"measured here: {self.ratio:.2f}x{bounds} {self.metric} of {self.model} on {self.hardware}"


@dataclass(frozen=True)
class Recommendation(Indexed):
    """One optimization. `technique` is its name in this package, None for what is no technique of it.

    `source` is what `effect` rests on. `advised` is False for what was measured to be slower on this machine.
    """

    title: str
    technique: str | None
    effect: str
    reason: str
    source: str
    advised: bool = True
    measured: MeasuredGain | None = None


@dataclass(frozen=True)
class Recommendations(Indexed):
    """What is recommended, the most important first; `priorities` are the lines that were printed."""

    recommendations: tuple[Recommendation, ...]
    priorities: list[str]


def recommend_optimization(
    vram_available_gb: float,
    task: str,
    accuracy_critical: bool,
    hardware: str,
    runs: Iterable[KeptRun] | None = None,
) -> Recommendations:
    """The optimizations that suit a scenario, by the decision guide and by what was measured; prints the list.

    `task` is training, inference or edge, `hardware` server_gpu, consumer_gpu, cpu or edge. An effect is what the
    technique's own page expects, a figure measured for this project before one from the literature. `runs` (None: those
    that `optigpu run` and `ladder` kept on this machine) overrule both: a technique that was measured alone has that
    figure; one for speed that was slower is listed last and not advised; and one that the guide does not name, and
    that was faster, is added, where it rounds nothing or accuracy is not critical. The key-value cache is left out of
    training, which has none.

    Raises SpecError for an unknown task or hardware, and for a negative memory.

    >>> from optigpu import recommend_optimization
    >>> found = recommend_optimization(16, "training", True, "consumer_gpu", runs=())  # doctest: +ELLIPSIS
    === OPTIMIZATION RECOMMENDATIONS ===
      1. Mixed precision (BF16 or FP16): ...
      2. Flash attention: ...
      3. torch.compile: ...
      4. Gradient checkpointing: ...
      5. Gradient accumulation: ...
      6. QLoRA: ...
    >>> found["priorities"] == found.priorities, found.recommendations[3].technique
    (True, 'gradient_checkpointing')
    """
    if not (isfinite(vram_available_gb) and vram_available_gb >= 0):
        raise SpecError(f"vram_available_gb: {vram_available_gb} is no amount of memory; name 0 or more.")
    scenario = Scenario(
        vram_available_gb,
        _one_of(GuideTask, "task", task),
        accuracy_critical,
        _one_of(GuideHardware, "hardware", hardware),
    )
    gains = measured_gains(kept_runs() if runs is None else runs, scenario)
    listed = [_recommended(advice, gains) for advice in advice_for(scenario)]
    listed += _beyond_the_guide(gains, {each.technique for each in listed}, accuracy_critical)
    ordered = sorted(listed, key=lambda each: not each.advised)
    priorities = [f"{number}. {_line(each)}" for number, each in enumerate(ordered, 1)]
    print("=== OPTIMIZATION RECOMMENDATIONS ===")
    for line in priorities:
        print(f"  {line}")
    return Recommendations(tuple(ordered), priorities)


def measured_gains(runs: Iterable[KeptRun], scenario: Scenario) -> dict[str, MeasuredGain]:
    """What each technique bought alone on such hardware and for such a task, by its name; `runs` are newest first."""
    found: dict[str, MeasuredGain] = {}
    for run in runs:
        results = {each["variant"]["index"]: each for each in run.results}
        for row in run.attribution.rows:
            result = results.get(row.index)
            gain = row.alone
            if gain is None or not gain.valid or row.technique is None or result is None:
                continue
            variant = result["variant"]
            if (
                variant["device"] == scenario.hardware.device
                and _trains(variant["workload"]) == scenario.trains
            ):
                measured = MeasuredGain(
                    technique=row.technique,
                    ratio=gain.ratio,
                    ci=gain.ci,
                    metric=run.attribution.metric,
                    model=variant["model"] or variant["workload"]["kind"],
                    hardware=result["environment"]["hardware_class"],
                    run_id=run.id,
                )
                found.setdefault(row.technique, measured)
    return found


def _trains(workload: dict[str, object]) -> bool:
    known = WORKLOADS.get(str(workload.get("kind")))
    return known is not None and known.task is Task.TRAINING


def _recommended(advice: Advice, gains: dict[str, MeasuredGain]) -> Recommendation:
    effect, source = _expected(advice)
    found = Recommendation(advice.title, advice.technique, effect, advice.reason, source)
    gain = gains.get(advice.technique or "")
    if gain is None:
        return found
    reason = "It was slower than without it on this machine." if gain.is_slower else advice.reason
    return replace(
        found,
        effect=str(gain),
        source=f"run {gain.run_id}",
        reason=reason if advice.for_speed else advice.reason,
        advised=not (advice.for_speed and gain.is_slower),
        measured=gain,
    )


def _beyond_the_guide(
    gains: dict[str, MeasuredGain], named: set[str | None], accuracy_critical: bool
) -> list[Recommendation]:
    """Techniques that were faster on this machine and that the guide does not name, the fastest first."""
    faster = [
        each for name, each in gains.items() if name not in named and each.is_faster and name in TECHNIQUES
    ]
    allowed = [
        each for each in faster if not accuracy_critical or TECHNIQUES[each.technique].keeps_predictions()
    ]
    return [
        Recommendation(
            title=each.technique,
            technique=each.technique,
            effect=str(each),
            reason=f"It was faster on this machine: {TECHNIQUES[each.technique].summary}.",
            source=f"run {each.run_id}",
            measured=each,
        )
        for each in sorted(allowed, key=lambda each: -each.ratio)
    ]


def _expected(advice: Advice) -> tuple[str, str]:
    """The effect that the technique's own page expects, and its source; the guide's claim where it has none."""
    kind = TECHNIQUES.get(advice.technique or "")
    if kind is None:
        return advice.claim, GUIDE
    best = min(kind.expected, key=lambda each: _TRUST.index(each.basis), default=None)
    if best is None or best.basis is Basis.AIM:
        return advice.claim, GUIDE
    source = best.source or (kind.citation if best.basis is Basis.LITERATURE else best.basis.value)
    return f"{best.basis}: {best.text}", source


def _line(each: Recommendation) -> str:
    return f"{each.title}: {each.effect}{'' if each.advised else ' (not advised)'}"


def _one_of(choices: type[Choice], field: str, given: str) -> Choice:
    try:
        return choices(given)
    except ValueError:
        known = ", ".join(choices)
        raise SpecError(f"{field}: {given!r} is unknown; write one of {known}.") from None
