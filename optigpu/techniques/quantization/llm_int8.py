from collections.abc import Mapping
from functools import partial
from typing import ClassVar, Literal

from pydantic import Field

from optigpu.hardware.cpu import cpu_features
from optigpu.models.described import StoredWeights
from optigpu.ops.layouts import llm_int8_bytes
from optigpu.techniques.base import Expected, Model, Notes, Trial, WeightsTechnique
from optigpu.vocabulary import DeviceKind, UnsupportedError

FLOAT16_LARGEST = 65504.0
"""Of float16, from which the library quantizes."""


class LlmInt8(WeightsTechnique):
    """Replaces every linear layer but the head, which stays in its dtype as it does in transformers.

    A column of activations in which any token reaches `threshold` is multiplied in the model's dtype with its weights;
    0 multiplies all in int8.
    """

    summary = "int8 weights and activations, and columns of outliers in the model's dtype"
    citation = "Dettmers et al., LLM.int8(), 2022, arXiv:2208.07339"
    expected = (
        Expected("arithmetic", "a quarter of the fp32 bytes of the layers that it replaces"),
        Expected(
            "literature",
            "no loss of quality up to 175 billion weights; slower than fp16 for models of fewer than 6.7 "
            "billion",
        ),
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        "autocast": "the int8 operators compute in the dtype of their inputs, which autocast does not change",
        "cuda_graphs": "how many columns hold outliers depends on the data, which no recording can follow",
        "grad_enabled": "int8 weights have no gradient",
    }
    extras = ("bitsandbytes",)
    error_bound = 0.15
    trials = (Trial(), Trial(beside=("fp16",), devices=(DeviceKind.CUDA,)))
    # It is for quality at a quarter of the bytes; int8_weight_only has that without the search for outliers.
    only_when_asked = True

    name: Literal["llm_int8"] = "llm_int8"
    threshold: float = Field(6.0, ge=0, le=1e4, allow_inf_nan=False)

    def stored(self, weights: StoredWeights, device: DeviceKind) -> StoredWeights:
        """int8 numbers of every layer but the head; sums are int32, which a CPU scales in three float32 tensors.

        On a CPU without AVX-512 the library widens a matrix to float32 for each product.
        """
        packed = weights.with_bytes(llm_int8_bytes, head=False, float_bias=False)
        if device is not DeviceKind.CPU:
            return packed.but(sum_bytes=4)
        widest = 0 if "avx512bw" in cpu_features() else max(matrix.elements for matrix in weights.linear)
        return packed.but(sum_bytes=16, widened_bytes=4 * widest)

    def modules(self, model: Model, notes: Notes) -> None:
        """Replaces the linear layers in place.

        Raises UnsupportedError as `places_but_the_head` does, and for weights that float16 does not hold.
        """
        from optigpu.surgery.bitsandbytes_layers import Int8OutlierLinear
        from optigpu.surgery.places import exchange, places_but_the_head, weight_of

        places = places_but_the_head(model, self.name)
        for place in places:
            if float(weight_of(place.layer).abs().max()) > FLOAT16_LARGEST:
                raise UnsupportedError(
                    f"{self.name} quantizes from float16, and {place.path} has weights beyond its range; use "
                    "int8_weight_only instead."
                )
        exchange(places, partial(Int8OutlierLinear.of, threshold=self.threshold))
        notes.record(int8_layers=len(places), int8_backend="bitsandbytes", outlier_threshold=self.threshold)
