from collections.abc import Mapping
from functools import partial
from typing import ClassVar, Literal

from optigpu.hardware.cpu import cpu_features
from optigpu.models.described import StoredWeights
from optigpu.ops.layouts import nf4_bytes
from optigpu.techniques.base import Expected, Model, Notes, Trial, WeightsTechnique
from optigpu.vocabulary import DeviceKind


class Nf4(WeightsTechnique):
    """Replaces every linear layer but the head, which stays in its dtype as it does in transformers.

    With `packing`, a layer in bfloat16 on a CPU that has AVX-512 for it gets the layout of the library's fused
    operator, where its sizes fit (outputs in 32s, inputs in 64s). Its statistics are then bfloat16 numbers and not
    quantized again, whatever `double_quantization` says. Every other layer is widened to the model's dtype for each
    product.
    """

    summary = "4-bit NormalFloat weights in blocks of 64, products in the model's dtype"
    citation = "Dettmers et al., QLoRA, 2023, arXiv:2305.14314"
    expected = (
        Expected("arithmetic", "an eighth of the fp32 bytes of the layers that it replaces"),
        Expected("literature", "smaller errors than 4-bit integers"),
        Expected(
            "aim",
            "faster than bf16 at small batches with fused kernels, slower where each product widens the "
            "weights first",
        ),
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        "autocast": "not all 4-bit operators compute in the dtype that autocast asks for",
        "cpu_offload": "weights are packed for the device that loads them, and an offloaded model is loaded on the CPU",
        "grad_enabled": "4-bit weights have no gradient",
    }
    extras = ("bitsandbytes",)
    error_bound = 0.5
    trials = (Trial(), Trial(beside=("bf16",), devices=(DeviceKind.CUDA,)))
    only_when_asked = True  # It is for memory, and costs quality

    name: Literal["nf4"] = "nf4"
    double_quantization: bool = True
    packing: bool = True

    def stored(self, weights: StoredWeights, device: DeviceKind) -> StoredWeights:
        """4-bit numbers of every layer but the head; a product of several tokens widens its matrix.

        The library's fused operator needs a CPU that multiplies bfloat16.
        """
        is_fused = device is not DeviceKind.CPU or "avx512_bf16" in cpu_features()
        half = weights.half and self.packing and is_fused
        layout = partial(nf4_bytes, device=device, nested=self.double_quantization, half=half)
        widest = max(matrix.elements for matrix in weights.linear)
        widened = 0 if device is DeviceKind.CPU and half else widest * weights.width
        packed = weights.with_bytes(layout, head=False, float_bias=False)
        return packed.but(widened_bytes=widened)

    def modules(self, model: Model, notes: Notes) -> None:
        """Replaces the linear layers in place, and records which kernel each has. Raises as `places_but_the_head`."""
        from optigpu.surgery.bitsandbytes_layers import Nf4Linear
        from optigpu.surgery.places import exchange, places_but_the_head

        places = places_but_the_head(model, self.name)
        layers = exchange(places, partial(Nf4Linear.of, double=self.double_quantization, packed=self.packing))
        notes.record(
            nf4_layers=len(layers),
            nf4_fused_layers=sum(layer.fused for layer in layers),
            nf4_double_quantized_layers=sum(layer.nested for layer in layers),
        )
