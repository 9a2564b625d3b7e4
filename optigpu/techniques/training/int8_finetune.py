from typing import Literal

from optigpu.hardware.device_kinds import Ability
from optigpu.surgery.extras import AdapterParameters
from optigpu.techniques.base import Choice, Expected, Model, Notes, Phase, TrainingTechnique


class Int8Finetune(AdapterParameters, TrainingTechnique):
    """Stores all linear layers but the head as int8 with a scale for each output, frozen; adds factors as lora does.

    Forward passes run through the operator of int8_weight_only. The backward pass widens one layer's weights at a time.
    """

    phase = Phase.ADAPTERS
    abilities = (Ability.OWN_KERNELS,)
    summary = "low-rank factors are trained beside frozen int8 weights"
    citation = "Dettmers et al., LLM.int8(), 2022, arXiv:2208.07339; Hu et al., LoRA, 2021, arXiv:2106.09685"
    expected = (
        Expected(
            "arithmetic",
            "a quarter of the fp32 bytes of the layers that it stores as int8, and lora's gradients",
        ),
        Expected(
            "measured here",
            "GPT-2, 4 documents of 128 tokens: a peak of 1095.9 MB instead of lora's 1350.4",
            "training.md",
        ),
        Expected("aim", "the speed of lora, with losses closer to it than those of qlora"),
    )
    extras = ("peft",)
    choices = (Choice.ADAPTERS, Choice.WEIGHTS)
    error_bound = 0.1
    only_when_asked = True  # It trains another model than all weights would make

    name: Literal["int8_finetune"] = "int8_finetune"

    def modules(self, model: Model, notes: Notes) -> None:
        """Replaces the linear layers in place and adds the factors. Raises as `frozen_with_factors` does."""
        from optigpu.ops.linear.int8_linear import int8_linear_backend
        from optigpu.surgery.adapters import frozen_with_factors
        from optigpu.surgery.integer_layers import Int8Linear

        facts = frozen_with_factors(model, self.name, Int8Linear.of, self)
        notes.record(frozen_format="int8", int8_backend=int8_linear_backend(model.device), **facts)
