from functools import partial
from typing import Literal, get_args

from optigpu.documents.facts import ModelFacts
from optigpu.documents.result import Environment
from optigpu.hardware.device_kinds import Ability
from optigpu.models.described import Part, StoredWeights
from optigpu.ops.layouts import int4_bytes
from optigpu.surgery.extras import FOUR_BITS
from optigpu.techniques.base import Expected, Model, Notes, Trial, WeightsTechnique
from optigpu.vocabulary import DeviceKind, UnsupportedError

GroupSize = Literal[32, 64, 128]


class Int4WeightOnly(WeightsTechnique):
    """Replaces every linear layer, GPT-2's Conv1D and the tied head by 4-bit ones.

    `group_size` inputs of an output share a scale in bfloat16, and an offset where they are not `symmetric`: 4 bits of
    a weight become 4.5, 4.25 or 4.125, or with offsets 5, 4.5 or 4.25. Symmetric groups of 32 cost less quality than
    larger ones with offsets and as many bytes, and so are the default. `solver` "min_max" takes the scales from the
    extremes of a group, "hqq" then improves them. Without `head` the head stays as it is. With it, a tied head becomes
    a 4-bit copy while the embedding keeps its dtype: a lookup reads one row for each token, so its bytes cost no time.
    """

    abilities = (Ability.OWN_KERNELS,)
    summary = "4-bit weights in groups that share a scale; activations stay as they are"
    citation = (
        "Badri and Shaji, Half-Quadratic Quantization of Large Machine Learning Models, 2023, "
        "mobiusml.github.io/hqq_blog"
    )
    expected = (
        Expected(
            "arithmetic",
            "a seventh of the fp32 bytes of the layers that it replaces, so up to 1.8x as fast as int8_weight_only "
            "where decoding is bound by memory",
        ),
        Expected(
            "measured here",
            "GPT-2 decoded on two Zen 4 cores: 5.64x, with torch_compile 9.96x eager fp32",
            "results/README.md",
        ),
        Expected(
            "literature",
            "small models lose more quality than large ones",
            "Frantar et al., GPTQ, 2022, arXiv:2210.17323",
        ),
    )
    conflicts = FOUR_BITS
    error_bound = 0.5
    trials = (Trial(), Trial(beside=("bf16",), devices=(DeviceKind.CUDA,)))
    only_when_asked = True  # Weights are quantized once, and int8_weight_only costs less quality

    name: Literal["int4_weight_only"] = "int4_weight_only"
    group_size: GroupSize = 32
    symmetric: bool = True
    solver: Literal["min_max", "hqq"] = "hqq"
    head: bool = True

    def check(self, environment: Environment, device: DeviceKind, model: ModelFacts | None) -> str | None:
        """The groups must divide the inputs of every layer, as far as those are known."""
        if model is None:
            return None
        inputs = {model.hidden_size, model.embedding_size, model.heads * model.head_size}
        inputs |= set() if model.inner_size is None else {model.inner_size}
        wrong = [number for number in sorted(inputs) if number % self.group_size]
        if not wrong:
            return None
        fitting = [size for size in get_args(GroupSize) if not any(number % size for number in inputs)]
        advice = (
            f"Set group_size to {' or '.join(map(str, fitting))}" if fitting else "Leave it out of the stack"
        )
        return (
            f"{self.name} needs layers whose inputs are a multiple of group_size {self.group_size}; this model has "
            f"layers with {wrong[0]}. {advice}."
        )

    def stored(self, weights: StoredWeights, device: DeviceKind) -> StoredWeights:
        """4-bit numbers of every linear layer, and with `head` a copy of a tied head.

        On CUDA only a model in bfloat16 has an operator that does not widen a matrix for each product.
        """
        layout = partial(
            int4_bytes, device=device, group=self.group_size, offsets=not self.symmetric, half=weights.half
        )
        packed = weights.with_bytes(layout, head=self.head)
        if device is DeviceKind.CPU or weights.half:
            return packed
        multiplied = (Part.LINEAR, Part.HEAD) if self.head else (Part.LINEAR,)
        widest = max(each.elements for each in weights.matrices if each.part in multiplied)
        return packed.but(widened_bytes=4 * widest)

    def modules(self, model: Model, notes: Notes) -> None:
        """Replaces the linear layers in place. Raises UnsupportedError as `checked_places` does."""
        from optigpu.ops.four_bits.scheme import Int4Scheme
        from optigpu.ops.linear.int4_linear import int4_linear_backend
        from optigpu.surgery.integer_layers import Int4Linear
        from optigpu.surgery.places import checked_places, exchange, weight_of

        places = checked_places(model, self.name, self.group_size)
        if not self.head:
            places = [place for place in places if place.layer is not model.get_output_embeddings()]
        if not places:
            raise UnsupportedError(
                f"{self.name} leaves the head as it is, and this model has no other linear layer; set head to true."
            )
        scheme = Int4Scheme(self.group_size, self.symmetric, self.solver)
        weight = weight_of(places[0].layer)
        backend = int4_linear_backend(weight.device, weight.dtype)
        exchange(places, partial(Int4Linear.of, scheme=scheme))
        notes.record(int4_layers=len(places), int4_backend=backend, int4_bits_per_weight=scheme.bits)
