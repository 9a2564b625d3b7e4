"""Measured figures that claims are compared with, from `optigpu run --format json` and from a leaderboard."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from optigpu.claims.stacks import PRECISIONS_BY_PARAMETER, Stack
from optigpu.claims.terms import QUALITY_METRICS
from optigpu.documents.older import facts_of
from optigpu.models.presets import IMAGE_PRESETS, PRESETS
from optigpu.vocabulary import Document

if TYPE_CHECKING:
    from optigpu.documents.views import LeaderboardRow


@dataclass(frozen=True)
class Measured:
    """One metric of one variant. `value` and `ci` are in the metric's unit; `models` are its known names.

    `dataset` is what its quality was measured on. `trained` says that the weights are not random.
    """

    metric: str
    value: float
    ci: tuple[float, float] | None
    label: str
    hardware: str
    workload: Document
    models: frozenset[str]
    stack: Stack
    backend: str
    result_id: str
    dataset: str | None = None
    trained: bool = False


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
                        stack=tuple(variant["stack"]),
                        backend=variant["backend"],
                        result_id=result["id"],
                        dataset=_dataset(result),
                        trained=not (variant["model"] or "").startswith("preset:"),
                    )
                )
    return found


def says_too_little(row: "LeaderboardRow") -> bool:
    """Whether only the row's result says what claims are matched by: a technique's bits, the text of a quality."""
    return row.metric in QUALITY_METRICS or bool(PRECISIONS_BY_PARAMETER.keys() & set(row.techniques))


def from_leaderboard(rows: Iterable["LeaderboardRow"]) -> list[Measured]:
    """The figure of each row, except for those that say too little."""
    return [
        Measured(
            metric=row.metric,
            value=row.value.value,
            ci=row.value.ci,
            label=row.label,
            hardware=row.hardware,
            workload=row.workload,
            models=_names(row.model),
            stack=tuple({"name": name} for name in row.techniques),
            backend=row.backend,
            result_id=row.result_id,
        )
        for row in rows
        if row.value.value is not None and not says_too_little(row)
    ]


def _dataset(result: Document) -> str | None:
    """The text that a result's quality was measured on, by its name in `measure.quality.text`."""
    text: str | None = (facts_of(result).get("quality") or {}).get("text")
    return text


def _names(model: str | None) -> frozenset[str]:
    """The presets that a measured model is: its own name, or the presets with the same repository."""
    kind, _, rest = (model or "").rpartition(":")
    name = rest.partition("@")[0]
    if kind == "preset":
        return frozenset({name})
    every = PRESETS | IMAGE_PRESETS
    same = (preset for preset, what in every.items() if what.source.casefold() == name.casefold())
    return frozenset({*same, name.rpartition("/")[2].casefold()})
