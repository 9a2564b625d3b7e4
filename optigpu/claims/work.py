"""Operations and bytes behind a claim's figure, from the shapes of its model."""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from optigpu.claims.model import Book, Claim, Precision
from optigpu.hardware.catalog import Device, Dtype
from optigpu.models.facts import facts_of
from optigpu.models.families import family_of
from optigpu.models.presets import PRESETS
from optigpu.models.reference import ModelReference

TRAINING_FACTOR = 3
"""Operations of a training step over those of a forward pass: the backward pass has two products for each one."""


@dataclass(frozen=True)
class Weights:
    """The matrices of a decoder as counts of weights, without norms and biases (at most a thousandth). `embedding`
    holds the tables of which a decode step reads one row (tokens, unless the head is tied to them; positions), `head`
    the projection to the vocabulary, which each step reads whole."""

    blocks: int
    embedding: int
    head: int

    @property
    def total(self) -> int:
        return self.blocks + self.embedding + self.head


@lru_cache
def weights_of(model: str | None) -> Weights | None:
    """The weights of a preset, counted from its shapes; None if it is not a decoder."""
    if model is None or model not in PRESETS:
        return None
    facts = facts_of(ModelReference(kind="preset", name=model))
    if facts is None or facts.work is None:
        return None
    table = facts.vocabulary * facts.embedding_size
    positions = facts.longest * facts.hidden_size if family_of(facts.family).learns_positions else 0
    return Weights(
        blocks=facts.work.flops // 2,
        embedding=positions + (0 if facts.tied_head else table),
        head=table,
    )


class NumberFormat(NamedTuple):
    """Bytes per weight of the blocks' matrices, and of embedding and head, without scales and zero points."""

    block_bytes: float
    table_bytes: float


NUMBER_FORMATS: dict[Precision, NumberFormat] = {
    "fp32": NumberFormat(4, 4),
    "fp16": NumberFormat(2, 2),
    "bf16": NumberFormat(2, 2),
    "int8": NumberFormat(1, 1),
    "int4": NumberFormat(0.5, 0.5),
    "q4_k_m": NumberFormat(0.5, 0.5),
    # bitsandbytes, GPTQ and AWQ checkpoints quantize the blocks and leave embedding and head at 16 bits.
    "llm_int8": NumberFormat(1, 2),
    "nf4": NumberFormat(0.5, 2),
    "gptq": NumberFormat(0.5, 2),
    "awq": NumberFormat(0.5, 2),
}
"""The fewest bytes that a weight takes in each precision."""

ARITHMETIC: dict[Precision, tuple[Dtype, ...]] = {
    "fp32": ("fp32",),
    "fp16": ("fp16",),
    "bf16": ("bf16",),
    "int8": ("int8", "fp16", "fp32"),
    "llm_int8": ("int8", "fp16"),
    "int4": ("int4", "int8", "fp16", "fp32"),
    "nf4": ("fp16", "bf16"),
    "gptq": ("fp16", "bf16"),
    "awq": ("fp16", "bf16"),
    "q4_k_m": ("int8", "fp16", "fp32"),
}
"""The dtypes that each precision may be computed in; quantized weights are often converted first."""


def peak_flop_per_s(claim: Claim, device: Device) -> float | None:
    """The highest rate at which the device can do the claim's operations; None where the catalog does not know."""
    dtypes = ARITHMETIC[claim.precision] if claim.precision else ()
    if claim.precision == "fp32" and claim.workload in ("classify", "train_step"):
        dtypes = (*dtypes, "tf32")  # PyTorch's convolutions use it by default
    known = device.peak_flop_per_s
    return max((known[dtype] for dtype in dtypes if dtype in known), default=None)


def flop_per_item(claim: Claim, book: Book) -> float | None:
    """Operations for one image, one token, or one call of attention; None if the claim lacks the needed facts."""
    match claim.workload:
        case "classify" | "train_step":
            macs = book.macs_of(claim.model)
            passes = TRAINING_FACTOR if claim.workload == "train_step" else 1
            return 2 * macs * passes if macs else None
        case "attention" if claim.batch_size and claim.heads and claim.head_dim and claim.sequence:
            # Two products of head_dim for each pair of a query and a key; the softmax between them is not counted.
            # Where the text does not say, there are as few pairs as in causal attention.
            length = claim.sequence
            pairs = length**2 if claim.causal is False else length * (length + 1) / 2
            return 4.0 * claim.batch_size * claim.heads * claim.head_dim * pairs
        case "generate" if weights := weights_of(claim.model):
            return 2.0 * (weights.blocks + weights.head)
        case _:
            return None


def flop_per_s(claim: Claim, book: Book) -> float | None:
    """The rate of operations that a claim implies; None where its figure implies none."""
    if claim.metric == "tflops":
        return claim.quantity * 1e12
    flop = flop_per_item(claim, book)
    if flop is None:
        return None
    if claim.metric in ("images_per_s", "tokens_per_s"):
        return claim.quantity * flop
    if claim.metric == "latency_s" and claim.workload in ("classify", "attention"):
        items = (claim.batch_size or 1) if claim.workload == "classify" else 1
        return items * flop / claim.quantity
    return None
