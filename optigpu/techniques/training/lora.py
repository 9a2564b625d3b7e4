from typing import Literal

from optigpu.surgery.extras import AdapterParameters
from optigpu.techniques.base import Choice, Expected, Model, Notes, Phase, TrainingTechnique


class Lora(AdapterParameters, TrainingTechnique):
    """Adds factors A [rank, inputs] and B [outputs, rank] to each layer: W x + alpha / rank * B A x.

    B begins at zero, so the first loss is the model's own. All other weights are frozen: they have no gradient and no
    optimizer state. The head gets no factors. `targets` "attention" leaves out the layers of the MLPs.
    """

    phase = Phase.ADAPTERS
    summary = "low-rank factors are trained beside frozen weights"
    citation = "Hu et al., LoRA, 2021, arXiv:2106.09685"
    expected = (
        Expected(
            "arithmetic",
            "gradients and optimizer states of rank * (inputs + outputs) weights for each layer instead of inputs * "
            "outputs, and no product for the gradient of a frozen weight: two thirds of the operations",
        ),
        Expected(
            "measured here",
            "GPT-2, 4 documents of 128 tokens: a peak of 1350.4 MB instead of 2334.1",
            "training.md",
        ),
        Expected(
            "literature", "a third of the memory and a quarter faster than training all weights of GPT-3 175B"
        ),
    )
    extras = ("peft",)
    choices = (Choice.ADAPTERS,)
    error_bound = 0.1
    only_when_asked = True  # It trains another model than all weights would make

    name: Literal["lora"] = "lora"

    def modules(self, model: Model, notes: Notes) -> None:
        """Adds the factors in place and freezes the rest. Raises as `chosen_places` and `places_but_the_head` do."""
        from optigpu.surgery.adapters import add_factors, chosen_places
        from optigpu.surgery.places import places_but_the_head

        places = chosen_places(model, places_but_the_head(model, self.name), self.targets, self.name)
        notes.record(**add_factors(model, places, self))
