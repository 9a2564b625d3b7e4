"""Which measured figure is of the same thing as a claim, and why there can be none for some claims."""

from collections.abc import Iterable
from dataclasses import replace

from optigpu.claims.measured import Measured
from optigpu.claims.model import Book, Claim
from optigpu.claims.stacks import same_stack
from optigpu.claims.terms import (
    BYTES,
    CLAIM_METRICS,
    NEEDS_HARDWARE,
    ON_ANY_HARDWARE,
    QUALITY_METRICS,
    SAME_EVERYWHERE,
    Precision,
)
from optigpu.hardware.catalog import HardwareKind, find, find_class
from optigpu.techniques import TECHNIQUES
from optigpu.vocabulary import METRICS, Better, Document

DTYPES: dict[str, Precision] = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
"""The precisions of an operator's dtypes."""
OWN_BACKEND = "torch"
"""The engine that a claim is about which lists techniques."""


def measured_for(claim: Claim, measured: Iterable[Measured], book: Book) -> Measured | None:
    """The best measured figure for the subject of a claim, on the claim's hardware if there is one; else None.

    A printed ratio or saving is that of the best figures for its two sides.
    """
    every = tuple(measured)
    if sides := claim.ratio_of or claim.saving_of:
        one, other = (measured_for(book.claim(side), every, book) for side in sides)
        return _combined(claim, one, other) if one and other and _comparable(one, other) else None
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
    restricted = f"No result is restricted to {claim.scope}." if claim.scope else None
    return _wrong_hardware(claim) or _wrong_stack(claim) or restricted


def _wrong_stack(claim: Claim) -> str | None:
    unknown = [name for name in claim.techniques or () if name not in TECHNIQUES]
    return f"OptiGPU has no technique {' or '.join(unknown)}." if unknown else None


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


def _comparable(one: Measured, other: Measured) -> bool:
    """Whether two figures are of one machine, or of a metric that does not depend on it, and none is 0."""
    return min(one.value, other.value) > 0 and (
        one.hardware == other.hardware or one.metric in ON_ANY_HARDWARE
    )


def _combined(claim: Claim, one: Measured, other: Measured) -> Measured:
    """The ratio of two figures, or the share that the second saves of the first."""
    value = one.value / other.value if claim.ratio_of else 1 - other.value / one.value
    label = f"{one.label} over {other.label}" if claim.ratio_of else f"{other.label} instead of {one.label}"
    return replace(one, metric=claim.metric, value=value, ci=None, label=label)


def _same(claim: Claim, measured: Measured) -> bool:
    return (
        measured.metric == claim.metric
        and (_any_hardware(claim) or _same_hardware(claim, measured))
        and _same_model(claim, measured)
        and (claim.metric in SAME_EVERYWHERE or _same_work(claim, measured.workload))
        and _same_variant(claim, measured)
        and (claim.metric not in QUALITY_METRICS or _same_test(claim, measured))
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
    return all(
        claimed is None or _same_shape(workload.get(name), claimed) for name, claimed in stated.items()
    )


def _same_shape(found: object, claimed: int | bool) -> bool:
    """Whether a workload's shape is the claimed one; None is not stated, and of images the model's own size."""
    return found is None or (
        list(found) == [claimed] if isinstance(found, (list, tuple)) else found == claimed
    )


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
    return same_stack(claim, measured.stack)


def _same_test(claim: Claim, measured: Measured) -> bool:
    return claim.dataset is not None and measured.dataset == claim.dataset and measured.trained


def _plain(name: str) -> str:
    """A model's name without differences in spelling: ResNet-50, resnet50."""
    return name.replace("-", "").replace("_", "").casefold()
