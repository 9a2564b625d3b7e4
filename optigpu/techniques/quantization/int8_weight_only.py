from functools import partial
from typing import Literal

from optigpu.hardware.device_kinds import Ability
from optigpu.models.described import StoredWeights
from optigpu.ops.layouts import int8_bytes
from optigpu.techniques.base import Expected, Model, Notes, Trial, WeightsTechnique
from optigpu.vocabulary import DeviceKind


class Int8WeightOnly(WeightsTechnique):
    """Replaces every linear layer, GPT-2's Conv1D and the tied head by int8 ones.

    A tied head becomes an int8 copy while the embedding keeps its dtype: a lookup reads one row for each token, so
    its bytes cost no time, and int8 rows would cost precision. `weight_bytes` counts both.
    """

    abilities = (Ability.OWN_KERNELS,)
    summary = "int8 weights with one scale for each output channel; activations stay as they are"
    citation = "Dettmers et al., LLM.int8(), 2022, arXiv:2208.07339 (vector-wise scales)"
    expected = (
        Expected(
            "arithmetic",
            "a quarter of the fp32 bytes of the layers that it replaces, so up to 4x where both sides are bound by "
            "memory",
        ),
        Expected(
            "measured here",
            "GPT-2 decoded on two Zen 4 cores: 4.57x, with torch_compile 6.99x eager fp32",
            "results/README.md",
        ),
    )
    error_bound = 0.1
    trials = (
        Trial(),
        Trial(beside=("bf16",), devices=(DeviceKind.CUDA,)),
        Trial(beside=("fp16",), devices=(DeviceKind.CUDA,)),
    )

    name: Literal["int8_weight_only"] = "int8_weight_only"

    def stored(self, weights: StoredWeights, device: DeviceKind) -> StoredWeights:
        return weights.with_bytes(partial(int8_bytes, device=device), head=True)

    def modules(self, model: Model, notes: Notes) -> None:
        """Replaces the linear layers in place. Raises UnsupportedError as `checked_places` does."""
        from optigpu.ops.linear.int8_linear import int8_linear_backend
        from optigpu.surgery.integer_layers import Int8Linear
        from optigpu.surgery.places import checked_places, exchange

        places = checked_places(model, self.name)
        exchange(places, Int8Linear.of)
        notes.record(int8_layers=len(places), int8_backend=int8_linear_backend(model.device))
