"""Which stack to use: by what was measured on such a machine, and where nothing was, by what fits its memory."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pprint import pformat
from textwrap import indent
from typing import Any, Literal

from optigpu.documents.versions import current, versions_of
from optigpu.fit.fitting import Fit, NamedStack, StackFit
from optigpu.job.spec import JobSpec, digest
from optigpu.vocabulary import METRICS, Better, DeviceKind, Document, Frozen, UnsupportedError

SMALL_LOSS = 0.15
"""Stacks whose techniques all keep logits within this share of the largest are preferred: 8 bits a weight and more."""

_CODE = """\
from optigpu.job.spec import JobSpec
from optigpu.measure import run

spec = JobSpec.model_validate(
{spec}
)
report = run(spec, on_event=lambda event: None)
for result in report.results:
    print(result.variant.label, result.metrics["{metric}"].value, "{unit}")
for outcome in report.outcomes:
    if outcome.reason:
        print(outcome.reason)
"""


class Evidence(Frozen):
    """A measured result that may answer: of the same workload digest, on the same class of hardware.

    `versions` are those that make results comparable, by package; `where` is what it was read from.
    """

    result_id: str
    where: str
    hardware: str
    measured_at: datetime
    versions: dict[str, str]
    label: str
    backend: str
    stack: tuple[dict[str, Any], ...]
    value: float
    kld_mean: float | None = None
    peak_bytes: float | None = None


class Advice(Frozen):
    """A recommended stack, why, and the code that measures it. `age_s` is the measurement's; null if predicted."""

    basis: Literal["measured", "predicted"]
    model: str
    hardware: str
    label: str
    backend: str
    device: DeviceKind
    stack: tuple[dict[str, Any], ...]
    reason: str
    age_s: float | None = None
    evidence: Evidence | None = None
    fit: StackFit | None = None
    code: str


def evidence_of(results: Iterable[Document], spec: JobSpec, where: str) -> list[Evidence]:
    """The valid results of the spec's workload and model among stored ones, with a figure of its primary metric."""
    found = []
    about = {"workload": spec.workload.identity(), "model": spec.model}
    for result in map(current, results):
        variant, figure = result["variant"], result["metrics"].get(spec.workload.primary) or {}
        provenance = result.get("provenance") or {}
        if not result["verdict"]["valid"] or figure.get("value") is None:
            continue
        weights = provenance.get("weight_hash")
        if variant["workload_digest"] not in (digest(about), digest(about | {"weights": weights})):
            continue
        found.append(
            Evidence(
                result_id=result["id"],
                where=where,
                hardware=result["environment"]["hardware_class"],
                measured_at=result["created_at"],
                versions=versions_of(variant["backend"], result["environment"]["software"]),
                label=variant["label"],
                backend=variant["backend"],
                stack=tuple(variant["stack"]),
                value=figure["value"],
                kld_mean=_value(result, "kld_mean"),
                peak_bytes=_value(result, "peak_bytes"),
            )
        )
    return found


def best_measured(
    evidence: Sequence[Evidence],
    spec: JobSpec,
    hardware: str,
    software: dict[str, str],
    *,
    max_kld: float | None,
    now: datetime | None = None,
) -> Advice | None:
    """The best of what was measured on that class of hardware with these versions; None where nothing was. With
    `max_kld` only results whose divergence is known and small enough count."""
    usable = [
        each
        for each in evidence
        if each.hardware == hardware
        and each.versions == versions_of(each.backend, software)
        and (max_kld is None or (each.kld_mean is not None and each.kld_mean <= max_kld))
    ]
    if not usable:
        return None
    metric = METRICS[spec.workload.primary]
    choose = max if metric.better is Better.HIGHER else min
    best = choose(usable, key=lambda each: each.value)
    age = (now or datetime.now(UTC)) - best.measured_at
    quality = f", kld_mean {best.kld_mean:.2g}" if best.kld_mean is not None else ""
    return Advice(
        basis="measured",
        model=str(spec.model),
        hardware=hardware,
        label=best.label,
        backend=best.backend,
        device=spec.device,
        stack=_parameters(best.stack),
        reason=(
            f"The best of {len(usable)} valid results of this workload on {hardware}: {best.value:.4g} {metric.unit}"
            f"{quality}, measured {_spoken(age.total_seconds())} ago with the same versions ({best.where})."
        ),
        age_s=age.total_seconds(),
        evidence=best,
        code=code_of(spec, best.backend, spec.device, _parameters(best.stack)),
    )


def best_predicted(
    found: Fit, stacks: Sequence[NamedStack], spec: JobSpec, hardware: str, *, max_kld: float | None
) -> Advice:
    """The stack of the fewest bytes that fits and has 8 bits a weight or more; one of 4 bits if no other fits. Raises
    UnsupportedError where nothing fits, with what would."""
    pairs = [pair for pair in zip(stacks, found.stacks, strict=True) if pair[1].fits]
    if not pairs:
        advice = " ".join(found.advice) or "Ask for less context, or for another GPU."
        raise UnsupportedError(f"No stack of {found.model} fits {found.gpu}. {advice}")

    def preference(pair: tuple[NamedStack, StackFit]) -> tuple[bool, bool, bool, int, int]:
        """The least is best: on the device, whole, with a small loss, in few bytes, of few techniques."""
        techniques, row = pair[0].techniques, pair[1]
        offloads = any(technique.name == "cpu_offload" for technique in techniques)
        lossy = any(technique.error_bound > SMALL_LOSS for technique in techniques)
        return row.host, offloads, lossy, row.weight_bytes or 0, len(techniques)

    stack, row = min(pairs, key=preference)
    device = DeviceKind.CPU if row.host else spec.device
    peak = (row.peak_bytes or 0) / 1e9
    fits = f"it fits {hardware} with {found.batch} x {found.context:,} tokens in {peak:.3g} of " + (
        f"{found.usable_bytes / 1e9:.3g} GB."
    )
    if row.host:
        fits = f"no stack fits {hardware}, and this one needs {peak:.3g} GB of the host's memory instead."
    unknown = ""
    if max_kld is not None:
        unknown = f" Only a measurement shows whether its kld_mean is at most {max_kld:g}."
    parameters = tuple(
        {"name": technique.name} | technique.model_dump(mode="json", exclude_defaults=True)
        for technique in stack.techniques
    )
    return Advice(
        basis="predicted",
        model=found.model,
        hardware=hardware,
        label=row.label,
        backend=row.backend,
        device=device,
        stack=parameters,
        reason=(f"Nothing was measured there, so this is predicted: {fits}{unknown}"),
        fit=row,
        code=code_of(spec, row.backend, device, parameters),
    )


def code_of(spec: JobSpec, backend: str, device: DeviceKind, stack: Sequence[Document]) -> str:
    """Python that measures the stack, ready to paste."""
    document = {
        "workload": spec.workload.model_dump(mode="json"),
        "model": spec.model,
        "backend": backend,
        "device": device.value,
        "stack": list(stack),
        "measure": {"replicates": 1, "min_seconds": 1, "max_seconds": 10, "meters": ["latency", "memory"]},
    }
    primary = spec.workload.primary
    text = pformat(document, sort_dicts=False, width=80)
    return _CODE.format(spec=indent(text, "    "), metric=primary, unit=METRICS[primary].unit)


def _parameters(stack: Sequence[Document]) -> tuple[dict[str, Any], ...]:
    """A stored stack as a request has it: without the versions of its techniques."""
    return tuple({name: value for name, value in each.items() if name != "version"} for each in stack)


def _value(result: Document, metric: str) -> float | None:
    value: float | None = (result["metrics"].get(metric) or {}).get("value")
    return value


def _spoken(seconds: float) -> str:
    for size, unit in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} seconds"
