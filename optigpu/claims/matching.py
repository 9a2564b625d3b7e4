"""Which measured figure is of the same thing as a claim, and why there can be none for some claims. Figures come from
`optigpu run --format json` and from a leaderboard; a stack matches that has the same precision and the same techniques
beside it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, get_args

from optigpu.claims.model import (
    BYTES,
    CLAIM_METRICS,
    NEEDS_HARDWARE,
    ON_ANY_HARDWARE,
    QUALITY_METRICS,
    SAME_EVERYWHERE,
    Book,
    Claim,
    Precision,
)
from optigpu.documents.versions import facts_of
from optigpu.hardware.catalog import HardwareKind, find, find_class
from optigpu.models.reference import IMAGE_PRESETS, PRESETS
from optigpu.techniques import TECHNIQUES
from optigpu.techniques.base import GgufType
from optigpu.vocabulary import METRICS, Better, Document

if TYPE_CHECKING:
    from optigpu.documents.views import LeaderboardRow


CARRIERS: Mapping[str, Precision] = MappingProxyType({"fp16": "fp16", "bf16": "bf16", "vllm_bf16": "bf16"})
"""Precisions of computation, which leave quantized weights at the precision that they have."""
UNCLAIMED = frozenset({"tf32", "autocast", "fp8"})
"""Techniques that give a precision of which there is no claim."""
Precisions = frozenset[Precision]
_NONE: Precisions = frozenset()
_INT4: Precisions = frozenset({"int4"})
_INT8: Precisions = frozenset({"int8"})
_NF4: Precisions = frozenset({"nf4", "int4"})
_FP16: Precisions = frozenset({"fp16"})
_BF16: Precisions = frozenset({"bf16"})
_NAMED_GGUF: Mapping[str, Precisions] = MappingProxyType(
    {"F16": _FP16, "BF16": _BF16, "Q4_K_M": frozenset({"q4_k_m", "int4"})}
)


def _of_gguf(kind: str) -> Precisions:
    """By the bits that a type's name begins with: IQ4_XS and Q4_0 are 4. No claim is about other bits."""
    bits = kind.removeprefix("I").removeprefix("Q")[:1]
    return _NAMED_GGUF.get(kind) or {"4": _INT4, "8": _INT8}.get(bits, _NONE)


PRECISIONS: Mapping[str, Precisions] = MappingProxyType(
    {
        **dict.fromkeys(("int8_weight_only", "int8_dynamic", "int8_finetune"), _INT8),
        **dict.fromkeys(("onnx_int8", "onnx_static_int8", "openvino_int8"), _INT8),
        **dict.fromkeys(("int4_weight_only", "onnx_int4", "openvino_int4"), _INT4),
        "llm_int8": frozenset({"llm_int8"}),
        "nf4": _NF4,
        "gptq": frozenset({"gptq", "int4"}),
        "awq": frozenset({"awq", "int4"}),
    }
)
"""The claimed precisions that a technique's weights have, whatever its parameters."""
PRECISIONS_BY_PARAMETER: Mapping[str, tuple[str, Mapping[object, Precisions]]] = MappingProxyType(
    {
        "int8_hybrid": ("bits", {8: _INT8, 4: _INT4}),
        "native_decode": (
            "weights",
            {
                **dict.fromkeys(("auto", "w3k", "w5", "w6"), _NONE),
                "w4": _INT4,
                "w4k": _INT4,
                "w8": _INT8,
                "bf16": _BF16,
            },
        ),
        "mixed_precision": ("dtype", {"float16": _FP16, "bfloat16": _BF16}),
        "qlora": ("base", {"nf4": _NF4, "int4": _INT4}),
        "gguf": ("type", {kind: _of_gguf(kind) for kind in get_args(GgufType)}),
    }
)
"""The parameter that decides a technique's bits, and the claimed precisions of its values."""
MORE_THAN_PRECISION = frozenset({"native_decode", "mixed_precision", "qlora", "int8_finetune"})
"""Techniques with a precision that claims name beside it: they change the decode step, or what is trained how."""
PRECISION_ALONE = (
    CARRIERS.keys() | PRECISIONS.keys() | UNCLAIMED | PRECISIONS_BY_PARAMETER.keys()
) - MORE_THAN_PRECISION
"""Techniques that change nothing beside the precision, so that claims name the precision instead."""

Stack = tuple[Document, ...]
"""Techniques as a result holds them: each with its name and parameters."""


def brought_along(names: Iterable[str]) -> frozenset[str]:
    found: frozenset[str] = frozenset()
    new = frozenset(names)
    while new:
        kinds = [TECHNIQUES[name] for name in new if name in TECHNIQUES]
        new = frozenset(name for kind in kinds for name in kind.requires) - found
        found |= new
    return found


def has_precision(claimed: Precision, stack: Stack) -> bool:
    """Whether the weights of a stack have a claimed precision."""
    names = {technique["name"] for technique in stack}
    if names & UNCLAIMED:
        return False
    carriers = {CARRIERS[name] for name in names & CARRIERS.keys()}
    weights = [precisions for technique in stack if (precisions := _weights_of(technique)) is not None]
    if frozenset() in weights:
        return False
    if claimed == "fp32":
        return not carriers and not weights
    if claimed in CARRIERS.values():
        return carriers.union(*weights) == {claimed}
    return bool(weights) and all(claimed in precisions for precisions in weights)


def _weights_of(technique: Document) -> Precisions | None:
    """The claimed precisions of a technique's weights, empty for others; None if it leaves them as they are."""
    name = technique["name"]
    if name not in PRECISIONS_BY_PARAMETER:
        return PRECISIONS.get(name)
    parameter, precisions = PRECISIONS_BY_PARAMETER[name]
    usual = TECHNIQUES[name].model_fields[parameter].default
    return precisions.get(technique.get(parameter, usual), _NONE)


@dataclass(frozen=True)
class Measured:
    """One metric of one variant. `value` and `ci` are in the metric's unit; `models` are its known names. `dataset` is
    what its quality was measured on. `trained` says that the weights are not random."""

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
                        # by its name in measure.quality.text
                        dataset=(facts_of(result).get("quality") or {}).get("text"),
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


def _names(model: str | None) -> frozenset[str]:
    """The presets that a measured model is: its own name, or the presets with the same repository."""
    kind, _, rest = (model or "").rpartition(":")
    name = rest.partition("@")[0]
    if kind == "preset":
        return frozenset({name})
    every = PRESETS | IMAGE_PRESETS
    same = (preset for preset, what in every.items() if what.source.casefold() == name.casefold())
    return frozenset({*same, name.rpartition("/")[2].casefold()})


DTYPES: dict[str, Precision] = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
"""The precisions of an operator's dtypes."""
OWN_BACKEND = "torch"
"""The engine that a claim is about which lists techniques."""


def measured_for(claim: Claim, measured: Iterable[Measured], book: Book) -> Measured | None:
    """The best measured figure for the subject of a claim, on the claim's hardware if there is one; else None. A
    printed ratio or saving is that of the best figures for its two sides."""
    every = tuple(measured)
    if sides := claim.ratio_of or claim.saving_of:
        one, other = (measured_for(book.claim(side), every, book) for side in sides)
        if one is None or other is None or min(one.value, other.value) <= 0:
            return None
        if one.hardware != other.hardware and one.metric not in ON_ANY_HARDWARE:
            return None
        value, label = one.value / other.value, f"{one.label} over {other.label}"
        if claim.saving_of:
            value, label = 1 - other.value / one.value, f"{other.label} instead of {one.label}"
        return replace(one, metric=claim.metric, value=value, ci=None, label=label)
    if claim.metric not in METRICS or claim.scope is not None:
        return None
    matches = [each for each in every if _same(claim, each)]
    there = [each for each in matches if _same_hardware(claim, each)]
    choose = max if METRICS[claim.metric].better is Better.HIGHER else min
    return choose(there or matches, key=lambda each: each.value, default=None)


def beside(claim: Claim, measured: Iterable[Measured]) -> list[Measured]:
    """The measured figures of the same work as a claim, of the same model and shapes, on any hardware by any stack."""
    return [
        each
        for each in measured
        if each.metric == claim.metric and _same_model(claim, each) and _same_work(claim, each.workload)
    ]


def why_never(claim: Claim) -> str | None:
    """Why no measured figure can be of the same thing as a claim, in a sentence; None if one can."""
    derived = claim.ratio_of or claim.saving_of
    if claim.metric == "speedup" and not derived:
        return "A ratio without its two figures; `optigpu ladder` measures ratios."
    if claim.metric in CLAIM_METRICS and not derived:
        return f"A result has no such metric: {CLAIM_METRICS[claim.metric]}."
    if claim.workload == "inference" and claim.metric not in SAME_EVERYWHERE:
        return "The text does not say which workload ran."
    if claim.metric in QUALITY_METRICS and claim.dataset is None:
        return "The text does not say what the quality was measured on."
    if wrong := _wrong_hardware(claim):
        return wrong
    if unknown := [name for name in claim.techniques or () if name not in TECHNIQUES]:
        return f"OptiGPU has no technique {' or '.join(unknown)}."
    return f"No result is restricted to {claim.scope}." if claim.scope else None


def _wrong_hardware(claim: Claim) -> str | None:
    if _any_hardware(claim) or (claim.hardware is None and claim.metric not in NEEDS_HARDWARE):
        return None
    if claim.hardware is None:
        return "The text names no hardware."
    device = find(claim.hardware)
    if device is None:
        return f"The catalog has no {claim.hardware}."
    return (
        f"OptiGPU does not run on the {device.name}." if device.kind is HardwareKind.MICROCONTROLLER else None
    )


def _same(claim: Claim, measured: Measured) -> bool:
    if claim.metric in QUALITY_METRICS and (
        claim.dataset is None or measured.dataset != claim.dataset or not measured.trained
    ):
        return False
    return (
        measured.metric == claim.metric
        and (_any_hardware(claim) or _same_hardware(claim, measured))
        and _same_model(claim, measured)
        and (claim.metric in SAME_EVERYWHERE or _same_work(claim, measured.workload))
        and _same_variant(claim, measured)
    )


def _any_hardware(claim: Claim) -> bool:
    return claim.metric in ON_ANY_HARDWARE or (claim.metric in BYTES and claim.hardware is None)


def _same_hardware(claim: Claim, measured: Measured) -> bool:
    device = find_class(measured.hardware)
    return device is not None and claim.hardware is not None and find(claim.hardware) is device


def _same_model(claim: Claim, measured: Measured) -> bool:
    return claim.model is None or _plain(claim.model) in map(_plain, measured.models)


def _same_work(claim: Claim, workload: Document) -> bool:
    """Whether the kind is equal, and the shapes that both sides state."""
    if workload.get("kind") != claim.workload:
        return False
    stated = {
        "batch_size": claim.batch_size,
        "heads": claim.heads,
        "head_size": claim.head_dim,
        "causal": claim.causal,
        "prompt_tokens": claim.prompt_tokens,
        "sizes": claim.size,
        "lengths": claim.sequence,
        "positions": claim.sequence,
        "sequence_tokens": claim.sequence,
        "image_size": claim.image_size,
    }
    for name, claimed in stated.items():
        found = workload.get(name)  # None is not stated, and of images the model's own size
        if claimed is not None and found is not None:
            shapes = list(found) if isinstance(found, (list, tuple)) else [found]
            if shapes != [claimed]:
                return False
    return True


def _same_variant(claim: Claim, measured: Measured) -> bool:
    """Whether the precision and the techniques are equal; those of an operator are part of its workload."""
    workload = measured.workload
    if dtypes := workload.get("dtypes"):
        return [DTYPES.get(dtype) for dtype in dtypes] == [claim.precision]
    if implementations := workload.get("implementations"):
        fused = list(implementations) == ["fused"]
        claimed = None if claim.techniques is None else "fused_attention" in claim.techniques
        return DTYPES.get(workload["dtype"]) == claim.precision and claimed in (None, fused)
    if claim.techniques is not None and measured.backend != OWN_BACKEND:
        return False
    # Whether the precision is equal, and the other techniques if the claim names them.
    if claim.precision is not None and not has_precision(claim.precision, measured.stack):
        return False
    if claim.techniques is None:
        return True
    named = frozenset(claim.techniques)
    used = {technique["name"] for technique in measured.stack} - PRECISION_ALONE
    return named <= used <= named | brought_along(named)


def _plain(name: str) -> str:
    """A model's name without differences in spelling: ResNet-50, resnet50."""
    return name.replace("-", "").replace("_", "").casefold()
