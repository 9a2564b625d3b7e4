from functools import partial
from typing import Literal

from pydantic import Field

from optigpu.documents.facts import ModelFacts
from optigpu.documents.result import Environment
from optigpu.hardware.device_kinds import Ability, refusal
from optigpu.surgery.extras import AdapterParameters, Package
from optigpu.techniques.base import Choice, Expected, Model, Notes, Phase, TrainingTechnique, Trial
from optigpu.vocabulary import DeviceKind


class Qlora(AdapterParameters, TrainingTechnique):
    """Stores all linear layers but the head in 4 bits, frozen, and adds factors as lora does.

    `base` "nf4" is bitsandbytes' NormalFloat in blocks of 64, whose statistics are quantized as well with
    `double_quantization`; "int4" is the format of int4_weight_only, in groups of 32. Both run on CPUs and on CUDA. The
    backward pass widens one layer's weights at a time.
    """

    phase = Phase.ADAPTERS
    summary = "low-rank factors are trained beside frozen weights of 4 bits"
    citation = "Dettmers et al., QLoRA, 2023, arXiv:2305.14314"
    expected = (
        Expected(
            "arithmetic",
            "an eighth to a seventh of the fp32 bytes of the layers that it stores in 4 bits, and lora's gradients",
        ),
        Expected(
            "measured here",
            "GPT-2, 4 documents of 128 tokens: a peak of 1054.5 MB instead of lora's 1350.4",
            "training.md",
        ),
        Expected("literature", "a model of 65B weights is finetuned on one GPU of 48 GB"),
        Expected("aim", "slower than lora, since each pass widens the weights"),
    )
    choices = (Choice.ADAPTERS, Choice.WEIGHTS)
    error_bound = 0.1
    trials = (Trial(), Trial({"base": "int4"}))
    only_when_asked = True  # It trains another model than all weights would make

    name: Literal["qlora"] = "qlora"
    base: Literal["nf4", "int4"] = Field("nf4", description="The format of the frozen weights.")
    double_quantization: bool = Field(
        True, description="Whether the statistics of nf4 are quantized as well."
    )

    def packages(self, model: ModelFacts | None) -> tuple[Package, ...]:
        return ("peft", "bitsandbytes") if self.base == "nf4" else ("peft",)

    def check(self, environment: Environment, device: DeviceKind, model: ModelFacts | None) -> str | None:
        """The format int4 has kernels of ours alone; and the libraries must be installed."""
        own = refusal(device, Ability.OWN_KERNELS, "qlora with the base int4", "set base to nf4")
        return (own if self.base == "int4" else None) or super().check(environment, device, model)

    def modules(self, model: Model, notes: Notes) -> None:
        """Replaces the linear layers in place and adds the factors. Raises as `frozen_with_factors` does."""
        from optigpu.ops.four_bits.scheme import Int4Scheme
        from optigpu.surgery.adapters import frozen_with_factors
        from optigpu.surgery.integer_layers import Int4Linear

        if self.base == "int4":
            scheme = Int4Scheme()
            four_bits = partial(Int4Linear.of, scheme=scheme, readable=True)
            facts = frozen_with_factors(model, self.name, four_bits, self, scheme.group_size)
        else:
            from optigpu.surgery.bitsandbytes_layers import Nf4Linear

            normal_floats = partial(Nf4Linear.of, double=self.double_quantization, packed=False)
            facts = frozen_with_factors(model, self.name, normal_floats, self)
        notes.record(frozen_format=self.base, **facts)
