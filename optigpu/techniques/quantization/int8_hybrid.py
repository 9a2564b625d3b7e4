from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from optigpu.hardware.device_kinds import Ability
from optigpu.models.described import Matrix, Part, StoredWeights
from optigpu.ops.layouts import int4_bytes, int8_bytes
from optigpu.surgery.bit_allocation import decide, least_bytes, table, total_bytes
from optigpu.techniques.base import ON_TEXT, Expected, Model, Notes, Trial, WeightsTechnique
from optigpu.vocabulary import DeviceKind, UnsupportedError

if TYPE_CHECKING:
    import torch


DEFAULT_TARGETS = {8: 0.26, 4: 0.16}
"""Shares of the fp32 bytes that GPT-2 and larger models reach with some room for more bits."""


class Int8Hybrid(WeightsTechnique):
    """int8 linear layers and one int8 table for the embedding and its tied head; norms stay as they are.

    `memory_target` is a share of the bytes that the weights have in fp32. What it leaves above the fewest bits goes to
    the head (with `bits` 4), then to the first block (`keep_first_block`), which is kept in up to 16 bits, then to the
    layers that rounding costs most. Without a target it is 0.26 (0.16 with 4 bits), or the least that a small model can
    reach. Without `quantize_embeddings` the tables of tokens and positions stay as they are, and with them a tied head.
    `smoothing`, from 0 to 1, is SmoothQuant's alpha: it moves outliers of activations into the weights, on a
    text that the model writes by itself, and leaves the model's outputs as they were. It is meant for rounded
    activations; here, with rounded weights alone, it helps a model with strong outliers and costs others a little (5%
    more divergence of bundled:tiny at 0.5).
    """

    tasks = ON_TEXT
    abilities = (Ability.OWN_KERNELS,)
    summary = (
        "a memory target decides each layer's bits: int8 (or 4 bits) with one table for embedding and head, the first "
        "block in up to 16 bits, norms as they are"
    )
    citation = (
        "Dettmers et al., LLM.int8(), 2022, arXiv:2208.07339 (mixed precision); smoothing: Xiao et al., SmoothQuant, "
        "2022, arXiv:2211.10438"
    )
    expected = (
        Expected(
            "measured here",
            "GPT-2 on two Zen 4 cores: 25.9% of the fp32 bytes, embedding included, at 4.30x; with 4 bits "
            "16.0% at 4.66x",
            "results/README.md",
        ),
        Expected(
            "aim", "26% of the fp32 bytes (16% with 4 bits); decoding as int8_weight_only (int4_weight_only)"
        ),
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        "autocast": "its operators compute in the dtype of their inputs, which autocast does not change",
        "cpu_offload": "weights are packed for the device that loads them, and an offloaded model is loaded on the CPU",
        "grad_enabled": "quantized weights have no gradient",
    }
    later = ("quantize_embeddings",)
    error_bound = 0.15
    trials = (Trial(), Trial({"bits": 4}, error_bound=0.5))
    only_when_asked = True  # int8_weight_only is as fast; this one is for those who need its memory

    name: Literal["int8_hybrid"] = "int8_hybrid"
    bits: Literal[8, 4] = 8
    memory_target: Annotated[float, Field(gt=0, le=1)] | None = None
    keep_first_block: bool = True
    smoothing: Annotated[float, Field(ge=0, le=1)] | None = None
    quantize_embeddings: bool = True

    def stored(self, weights: StoredWeights, device: DeviceKind) -> StoredWeights:
        """The bytes of the memory target, or of the fewest bits where those are more.

        Which layers get more bits depends on the weights, so that the sum may be below the target by less than a layer.
        """
        return hybrid_bytes(weights, self.bits, device, self.memory_target or DEFAULT_TARGETS[self.bits])

    def modules(self, model: Model, notes: Notes, calibration_ids: "torch.Tensor | None" = None) -> None:
        """Replaces linear layers and tables in place and records what was decided for each.

        `calibration_ids` is a text for the smoothing, int64 [sequences, length]; None: one that the model writes.
        Raises UnsupportedError when the model has no linear layer, is quantized already, has weights that are NaN
        or infinite, cannot be smoothed as asked, or cannot be as small as asked.
        """
        from optigpu.ops.linear.int4_linear import int4_linear_backend
        from optigpu.ops.linear.int8_linear import int8_linear_backend
        from optigpu.surgery import hybrid_layers
        from optigpu.surgery.smoothing import own_text, smooth

        parts = hybrid_layers.parts_of(model, self.name, self.quantize_embeddings)
        whole, rest = hybrid_layers.fp32_bytes(model), hybrid_layers.rest_of(parts)
        target = DEFAULT_TARGETS[self.bits] if self.memory_target is None else self.memory_target
        budget = int(target * whole) - total_bytes(rest)
        if self.memory_target is not None:
            self._require(
                least_bytes(hybrid_layers.candidates_of(parts, self.bits, self.keep_first_block)),
                budget,
                whole,
            )
        if self.smoothing is not None:
            ids = own_text(model) if calibration_ids is None else calibration_ids
            notes.record(smoothed_norms=smooth(model, ids, self.smoothing))
        decisions = decide(hybrid_layers.candidates_of(parts, self.bits, self.keep_first_block), budget)
        hybrid_layers.carry_out(parts, decisions)
        notes.record(
            hybrid_target=target,
            hybrid_share=round(total_bytes([*decisions, *rest]) / whole, 4),
            hybrid_layers=table([*decisions, *rest]),
            int8_backend=int8_linear_backend(model.device),
        )
        if self.bits == 4:
            notes.record(int4_backend=int4_linear_backend(model.device, model.dtype))

    def _require(self, least: int, budget: int, whole: int) -> None:
        """Raises UnsupportedError when even the fewest bits are over the budget, with the least that can be reached."""
        if least > budget:
            share = (self.memory_target or 0) + (least - budget) / whole
            others = [
                *(["set bits to 4"] if self.bits == 8 else []),
                *([] if self.quantize_embeddings else ["quantize the embeddings"]),
            ]
            raise UnsupportedError(
                f"{self.name}: with {self.bits} bits this model needs at least {share:.2%} of its fp32 bytes, and "
                f"memory_target is {self.memory_target:.2%}; {', or '.join(['raise it', *others])}."
            )


GROUP = 32
"""Of Int4Scheme's default."""


def hybrid_bytes(weights: StoredWeights, bits: int, device: DeviceKind, target: float) -> StoredWeights:
    """The fewest bits for every matrix, and what the target leaves above them as one more entry of `other_bytes`."""
    four = partial(int4_bytes, device=device, group=GROUP, offsets=False, half=weights.half)
    eight = partial(int8_bytes, device=device)

    def least(outputs: int, inner: int) -> int:
        return eight(outputs, inner) if bits == 8 or inner % GROUP else four(outputs, inner)

    packed = weights.with_bytes(least, head=True)
    matrices = tuple(_table(matrix, weights, eight) for matrix in packed.matrices)
    found = packed.but(matrices=matrices)
    numbers = sum(
        matrix.count * (matrix.elements + (matrix.outputs if matrix.bias_bytes else 0))
        for matrix in weights.matrices
        if not (matrix.part is Part.HEAD and weights.tied)  # a tied head has none of its own
    )
    whole = 4 * (numbers + weights.other_bytes // weights.width)
    return found.but(other_bytes=found.other_bytes + max(0, int(target * whole) - found.bytes))


def _table(matrix: Matrix, weights: StoredWeights, eight: "partial[int]") -> Matrix:
    """An embedding is int8, or the head's own table where they are tied; positions get 16 bits at the most."""
    if matrix.part is Part.EMBEDDING:
        return replace(matrix, bytes=0 if weights.tied else eight(matrix.outputs, matrix.inner))
    if matrix.part is Part.POSITIONS:
        return replace(matrix, bytes=matrix.elements * min(2, weights.width))
    return matrix
