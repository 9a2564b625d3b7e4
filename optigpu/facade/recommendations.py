"""recommend_optimization: the decision guide as data, corrected by what was measured on this machine."""

import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.resources import files
from math import inf, isfinite

from optigpu.facade.benchmark_result import Indexed
from optigpu.runs import KeptRun, kept_runs
from optigpu.statistics.estimates import Bounds
from optigpu.techniques import TECHNIQUES
from optigpu.vocabulary import DeviceKind, Frozen, SpecError, Task
from optigpu.workloads import WORKLOADS

GUIDE = "the founding documents' decision guide, a claim"


TASKS = ("training", "inference", "edge")
HARDWARE = ("server_gpu", "consumer_gpu", "cpu", "edge")


@dataclass(frozen=True)
class Scenario:
    """What somebody has, and whether it is for training."""

    vram_available_gb: float
    trains: bool
    accuracy_critical: bool
    hardware: str

    @property
    def device(self) -> DeviceKind:
        """What a technique must run on there."""
        return DeviceKind.CUDA if self.hardware.endswith("_gpu") else DeviceKind.CPU


class Advice(Frozen):
    """One line of the guide, as guide.toml explains it."""

    title: str
    technique: str | None = None
    claim: str
    reason: str
    for_speed: bool = True
    trains: bool | None = None
    accuracy_critical: bool | None = None
    hardware: tuple[str, ...] = HARDWARE
    below_gb: float = inf

    def is_for(self, scenario: Scenario) -> bool:
        """Whether the scenario is of the kind that the line names."""
        return (
            self.trains in (None, scenario.trains)
            and self.accuracy_critical in (None, scenario.accuracy_critical)
            and scenario.hardware in self.hardware
            and scenario.vram_available_gb < self.below_gb
        )


def advice_for(scenario: Scenario) -> Iterator[Advice]:
    """The guide's lines for a scenario, the most important first."""
    guide = files("optigpu.facade").joinpath("guide.toml").read_text(encoding="utf-8")
    for advice in map(Advice.model_validate, tomllib.loads(guide)["advice"]):
        if advice.is_for(scenario):
            small = f"{scenario.vram_available_gb:g} GB is less than {advice.below_gb:g} GB. "
            reason = f"{small if isfinite(advice.below_gb) else ''}{advice.reason}"
            yield advice.model_copy(update={"reason": reason})


_TRUST = ("measured here", "literature", "arithmetic", "aim")
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
        return self.ci is not None and self.ci[1] < 1

    def __str__(self) -> str:
        bounds = f" [{self.ci[0]:.2f}, {self.ci[1]:.2f}]" if self.ci else ""
        return f"measured here: {self.ratio:.2f}x{bounds} {self.metric} of {self.model} on {self.hardware}"


@dataclass(frozen=True)
class Recommendation(Indexed):
    """One optimization. `technique` is its name in this package, None for what is no technique of it. `source` is what
    `effect` rests on. `advised` is False for what was measured to be slower on this machine."""

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
    that was faster, is added, where it rounds nothing or accuracy is not critical.

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
    for field, given, known in (("task", task, TASKS), ("hardware", hardware, HARDWARE)):
        if given not in known:
            raise SpecError(f"{field}: {given!r} is unknown; write one of {', '.join(known)}.")
    scenario = Scenario(vram_available_gb, task == "training", accuracy_critical, hardware)
    gains = measured_gains(kept_runs() if runs is None else runs, scenario)
    listed = [_recommended(advice, gains) for advice in advice_for(scenario)]
    listed += _beyond_the_guide(gains, {each.technique for each in listed}, accuracy_critical)
    ordered = sorted(listed, key=lambda each: not each.advised)
    priorities = [
        f"{number}. {each.title}: {each.effect}{'' if each.advised else ' (not advised)'}"
        for number, each in enumerate(ordered, 1)
    ]
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
            kind = WORKLOADS.get(str(variant["workload"].get("kind")))
            trains = kind is not None and kind.task is Task.TRAINING
            if variant["device"] == scenario.device and trains == scenario.trains:
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
        each
        for name, each in gains.items()
        if name not in named and name in TECHNIQUES and each.ci is not None and each.ci[0] > 1
        if not accuracy_critical or TECHNIQUES[name].keeps_predictions()
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
        for each in sorted(faster, key=lambda each: -each.ratio)
    ]


def _expected(advice: Advice) -> tuple[str, str]:
    kind = TECHNIQUES.get(advice.technique or "")
    if kind is None:
        return advice.claim, GUIDE
    best = min(kind.expected, key=lambda each: _TRUST.index(each.basis), default=None)
    if best is None or best.basis == "aim":
        return advice.claim, GUIDE
    source = best.source or (kind.citation if best.basis == "literature" else best.basis)
    return f"{best.basis}: {best.text}", source
