"""lora: low-rank factors beside linear layers are trained, and nothing else."""

from typing import TYPE_CHECKING, ClassVar, Literal

from optigpu.documents.result import Environment
from optigpu.documents.shapes import ModelFacts
from optigpu.surgery.extras import AdapterParameters, Package
from optigpu.techniques.base import IN_TRAINING, Basis, Choice, Expected, Notes, Phase, Technique
from optigpu.vocabulary import DeviceKind, Layer, Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Lora(AdapterParameters, Technique):
    """Adds factors A [rank, inputs] and B [outputs, rank] to each layer: W x + alpha / rank * B A x.

    B begins at zero, so the first loss is the model's own. All other weights are frozen: they have no gradient and no
    optimizer state. The head gets no factors. `targets` "attention" leaves out the layers of the MLPs.
    """

    layer: ClassVar[Layer] = Layer.TRAINING
    phase: ClassVar[Phase] = Phase.ADAPTERS
    tasks: ClassVar[tuple[Task, ...]] = IN_TRAINING
    summary: ClassVar[str] = "low-rank factors are trained beside frozen weights"
    citation: ClassVar[str] = "Hu et al., LoRA, 2021, arXiv:2106.09685"
    expected: ClassVar[tuple[Expected, ...]] = (
        Expected(
            Basis.ARITHMETIC,
            "gradients and optimizer states of rank * (inputs + outputs) weights for each layer instead of inputs * "
            "outputs, and no product for the gradient of a frozen weight: two thirds of the operations",
        ),
        Expected(
            Basis.MEASURED,
            "GPT-2, 4 documents of 128 tokens: a peak of 1350.4 MB instead of 2334.1",
            "training.md",
        ),
        Expected(
            Basis.LITERATURE,
            "a third of the memory and a quarter faster than training all weights of GPT-3 175B",
        ),
    )
    choices: ClassVar[tuple[Choice, ...]] = (Choice.ADAPTERS,)
    error_bound: ClassVar[float] = 0.1

    name: Literal["lora"] = "lora"

    def packages(self, model: ModelFacts | None) -> tuple[Package, ...]:
        """The library is an extra."""
        return ("peft",)

    def suits(self, environment: Environment, device: DeviceKind) -> bool:
        """It trains another model than all weights would make."""
        return False

    def modules(self, model: "PreTrainedModel", notes: Notes) -> None:
        """Adds the factors in place and freezes the rest.

        Raises UnsupportedError, with the model left as it was, when it has no linear layer for them, is quantized, or
        has weights that are NaN or infinite.
        """
        from optigpu.surgery.adapters import add_factors, chosen_places
        from optigpu.surgery.places import places_but_the_head

        places = chosen_places(model, places_but_the_head(model, self.name), self.targets, self.name)
        notes.record(**add_factors(model, places, self))
