"""Whether a measured stack is the one that a claim is about: the same precision, the same techniques beside it."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import get_args

from optigpu.claims.model import Claim
from optigpu.claims.terms import Precision
from optigpu.techniques import TECHNIQUES
from optigpu.techniques.base import GgufType
from optigpu.vocabulary import Document

CARRIERS: Mapping[str, Precision] = MappingProxyType({"fp16": "fp16", "bf16": "bf16", "vllm_bf16": "bf16"})
"""Precisions of computation, which leave quantized weights at the precision that they have."""
UNCLAIMED = frozenset({"tf32", "autocast", "fp8"})
"""Techniques that give a precision of which there is no claim."""
_NAMED_GGUF: Mapping[str, frozenset[Precision]] = MappingProxyType(
    {"F16": frozenset({"fp16"}), "BF16": frozenset({"bf16"}), "Q4_K_M": frozenset({"q4_k_m", "int4"})}
)
_GGUF_OF_BITS: Mapping[str, frozenset[Precision]] = MappingProxyType(
    {"4": frozenset({"int4"}), "8": frozenset({"int8"})}
)


def _of_gguf(kind: str) -> frozenset[Precision]:
    """By the bits that a type's name begins with: IQ4_XS and Q4_0 are 4. No claim is about other bits."""
    digits = kind.removeprefix("I").removeprefix("Q")
    return _NAMED_GGUF.get(kind) or _GGUF_OF_BITS.get(digits[:1], frozenset())


PRECISIONS: Mapping[str, frozenset[Precision]] = MappingProxyType(
    {
        "int8_weight_only": frozenset({"int8"}),
        "int8_dynamic": frozenset({"int8"}),
        "llm_int8": frozenset({"llm_int8"}),
        "int4_weight_only": frozenset({"int4"}),
        "nf4": frozenset({"nf4", "int4"}),
        "gptq": frozenset({"gptq", "int4"}),
        "awq": frozenset({"awq", "int4"}),
        "int8_finetune": frozenset({"int8"}),
        **dict.fromkeys(("onnx_int8", "onnx_static_int8", "openvino_int8"), frozenset({"int8"})),
        **dict.fromkeys(("onnx_int4", "openvino_int4"), frozenset({"int4"})),
    }
)
"""The claimed precisions that a technique's weights have, whatever its parameters."""
PRECISIONS_BY_PARAMETER: Mapping[str, tuple[str, Mapping[object, frozenset[Precision]]]] = MappingProxyType(
    {
        "int8_hybrid": ("bits", {8: frozenset({"int8"}), 4: frozenset({"int4"})}),
        "native_decode": (
            "weights",
            {
                "w3k": frozenset(),
                **dict.fromkeys(("w4", "w4k"), frozenset({"int4"})),
                "w8": frozenset({"int8"}),
                "bf16": frozenset({"bf16"}),
            },
        ),
        "mixed_precision": ("dtype", {"float16": frozenset({"fp16"}), "bfloat16": frozenset({"bf16"})}),
        "qlora": ("base", {"nf4": frozenset({"nf4", "int4"}), "int4": frozenset({"int4"})}),
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


def same_stack(claim: Claim, stack: Stack) -> bool:
    """Whether the precision is equal, and the other techniques if the claim names them."""
    if claim.precision is not None and not has_precision(claim.precision, stack):
        return False
    return claim.techniques is None or _same_names(frozenset(claim.techniques), stack)


def _same_names(claimed: frozenset[str], stack: Stack) -> bool:
    """Whether the techniques are those of the claim; what they bring along may be there as well."""
    used = {technique["name"] for technique in stack} - PRECISION_ALONE
    return claimed <= used <= claimed | brought_along(claimed)


def brought_along(names: Iterable[str]) -> frozenset[str]:
    """The techniques that a stack gets because others require them."""
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


def _weights_of(technique: Document) -> frozenset[Precision] | None:
    """The claimed precisions of a technique's weights, empty for others; None if it leaves them as they are."""
    name = technique["name"]
    if name not in PRECISIONS_BY_PARAMETER:
        return PRECISIONS.get(name)
    parameter, precisions = PRECISIONS_BY_PARAMETER[name]
    value = (
        technique[parameter] if parameter in technique else TECHNIQUES[name].model_fields[parameter].default
    )
    return precisions.get(value, frozenset())
