"""Measured figures for each claim, from `optigpu run --json` and from a leaderboard."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from optigpu.claims.model import Claim, Precision
from optigpu.hardware.catalog import find, find_class
from optigpu.models.presets import IMAGE_PRESETS, PRESETS
from optigpu.vocabulary import METRICS, Better, Document

if TYPE_CHECKING:
    from optigpu.documents.views import LeaderboardRow

TECHNIQUES_OF: dict[Precision, frozenset[str]] = {
    "fp32": frozenset(),
    "fp16": frozenset({"fp16"}),
    "bf16": frozenset({"bf16"}),
    "int8": frozenset({"int8_weight_only", "int8_dynamic", "int8_hybrid"}),
    "llm_int8": frozenset({"llm_int8"}),
    "int4": frozenset({"int4_weight_only", "nf4", "gptq", "awq"}),
    "nf4": frozenset({"nf4"}),
    "gptq": frozenset({"gptq"}),
    "awq": frozenset({"awq"}),
    "q4_k_m": frozenset({"q4_k_m"}),
}
"""The techniques that give a model the precision of a claim."""
CARRIERS = frozenset({"fp16", "bf16"})
"""Precisions of computation that leave a quantized variant at the precision of its weights."""
DTYPES: dict[str, Precision] = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
"""The precisions of an operator's dtypes."""


@dataclass(frozen=True)
class Measured:
    """One metric of one variant. `value` and `ci` are in the metric's unit; `models` are its known names."""

    metric: str
    value: float
    ci: tuple[float, float] | None
    label: str
    hardware: str
    workload: Document
    models: frozenset[str]
    techniques: frozenset[str]
    result_id: str


def from_results(results: Iterable[Document]) -> list[Measured]:
    """The figures of the valid results among result documents."""
    found = []
    for result in results:
        variant = result["variant"]
        for name, summary in result["metrics"].items():
            if result["verdict"]["valid"] and summary["value"] is not None:
                found.append(
                    Measured(
                        metric=name,
                        value=summary["value"],
                        ci=tuple(summary["ci"]) if summary["ci"] else None,
                        label=variant["label"],
                        hardware=result["environment"]["hardware_class"],
                        workload=variant["workload"],
                        models=_names(variant["model"]),
                        techniques=frozenset(technique["name"] for technique in variant["stack"]),
                        result_id=result["id"],
                    )
                )
    return found


def from_leaderboard(rows: Iterable["LeaderboardRow"]) -> list[Measured]:
    """The figure of each row."""
    return [
        Measured(
            metric=row.metric,
            value=row.value.value,
            ci=row.value.ci,
            label=row.label,
            hardware=row.hardware,
            workload=row.workload,
            models=_names(row.model),
            techniques=frozenset(row.techniques),
            result_id=row.result_id,
        )
        for row in rows
        if row.value.value is not None
    ]


def measured_for(claim: Claim, measured: Iterable[Measured]) -> Measured | None:
    """The best measured figure for the subject of a claim, on its hardware; None if there is none."""
    if claim.hardware is None or claim.metric not in METRICS:
        return None
    matches = [each for each in measured if _same(claim, each)]
    choose = max if METRICS[claim.metric].better is Better.HIGHER else min
    return choose(matches, key=lambda each: each.value, default=None)


def _same(claim: Claim, measured: Measured) -> bool:
    return (
        measured.metric == claim.metric
        and measured.workload.get("kind") == claim.workload
        and _same_hardware(claim, measured)
        and (claim.model is None or _plain(claim.model) in map(_plain, measured.models))
        and _same_shapes(claim, measured.workload)
        and _same_stack(claim, measured)
    )


def _same_hardware(claim: Claim, measured: Measured) -> bool:
    device = find_class(measured.hardware)
    return device is not None and claim.hardware is not None and find(claim.hardware) is device


def _same_shapes(claim: Claim, workload: Document) -> bool:
    """Whether the shapes that both sides state are equal."""
    stated = {"batch_size": claim.batch_size, "heads": claim.heads, "head_size": claim.head_dim}
    if claim.size is not None and list(workload.get("sizes", ())) != [claim.size]:
        return False
    if claim.sequence is not None and list(workload.get("lengths", [claim.sequence])) != [claim.sequence]:
        return False
    return all(size is None or workload.get(name, size) == size for name, size in stated.items())


def _same_stack(claim: Claim, measured: Measured) -> bool:
    """Whether the precision is equal, and the other techniques if the claim names them."""
    if dtypes := measured.workload.get("dtypes"):
        return [DTYPES.get(dtype) for dtype in dtypes] == [claim.precision]
    if implementations := measured.workload.get("implementations"):
        fused = list(implementations) == ["fused"]
        claimed = None if claim.techniques is None else "fused_attention" in claim.techniques
        return DTYPES.get(measured.workload["dtype"]) == claim.precision and claimed in (None, fused)
    every = frozenset[str]().union(*TECHNIQUES_OF.values())
    if claim.techniques is not None and measured.techniques - every != set(claim.techniques):
        return False
    return claim.precision is None or _same_precision(claim.precision, measured.techniques & every)


def _same_precision(claimed: Precision, used: frozenset[str]) -> bool:
    wanted = TECHNIQUES_OF[claimed]
    if not wanted or wanted <= CARRIERS:
        return used == wanted
    return bool(used & wanted) and used <= wanted | CARRIERS


def _plain(name: str) -> str:
    """A model's name without differences in spelling: ResNet-50, resnet50."""
    return name.replace("-", "").replace("_", "").casefold()


def _names(model: str | None) -> frozenset[str]:
    """The presets that a measured model is: its own name, or the presets with the same repository."""
    kind, _, rest = (model or "").rpartition(":")
    name = rest.partition("@")[0]
    if kind == "preset":
        return frozenset({name})
    every = PRESETS | IMAGE_PRESETS
    same = (preset for preset, what in every.items() if what.source.casefold() == name.casefold())
    return frozenset({*same, name.rpartition("/")[2].casefold()})
