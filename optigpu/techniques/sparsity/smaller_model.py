from typing import Literal

from pydantic import Field, field_validator

from optigpu.documents.facts import ModelFacts
from optigpu.documents.result import Environment
from optigpu.models.described import facts_of
from optigpu.models.reference import parse_reference
from optigpu.techniques.base import Expected, LoadOptions, Phase, Technique, Trial
from optigpu.vocabulary import DeviceKind, UnsupportedError, as_value_error

NO_MODEL = (
    "smaller_model needs a model; write smaller_model:model=path:DIR, a folder that optigpu recipe made."
)


class SmallerModel(Technique):
    """Loads another model with the same vocabulary instead, and applies the rest of the stack to it.

    Its speed and its quality are then relative to the model that the job names: the divergence is that of the smaller
    model from the fp32 one of full size. `optigpu recipe` makes such models.
    """

    phase = Phase.PRUNING
    summary = "a distilled or pruned model in the place of the one that it was made from"
    citation = (
        "Hinton et al., Distilling the Knowledge in a Neural Network, 2015, arXiv:1503.02531; Sanh et al., DistilBERT, "
        "2019, arXiv:1910.01108; Molchanov et al., Importance Estimation for Neural Network Pruning, 2019, "
        "arXiv:1906.10771"
    )
    expected = (
        Expected(
            "literature",
            "40% smaller and 60% faster with 97% of the score, for BERT with half of its layers",
            "Sanh et al., DistilBERT, 2019, arXiv:1910.01108",
        ),
        Expected("aim", "a loss of quality that training makes smaller and never removes"),
    )
    cautionary = True
    approximates = True
    trials = (Trial({"model": "bundled:tiny"}),)

    name: Literal["smaller_model"] = "smaller_model"
    model: str | None = Field(
        None,
        max_length=200,
        examples=["path:tiny-distilled"],
        description="The model that is loaded instead.",
    )

    @field_validator("model")
    @classmethod
    def _canonical_reference(cls, model: str | None) -> str | None:
        return None if model is None else str(as_value_error(parse_reference, model))

    def check(self, environment: Environment, device: DeviceKind, model: ModelFacts | None) -> str | None:
        if self.model is None:
            return NO_MODEL
        smaller = facts_of(parse_reference(self.model))
        if smaller is None or model is None or smaller.vocabulary == model.vocabulary:
            return None
        return (
            f"{self.model} has {smaller.vocabulary} tokens and the model {model.vocabulary}; name one with the same "
            "vocabulary."
        )

    def load(self, options: LoadOptions) -> LoadOptions:
        """Another model is loaded. Raises UnsupportedError if none is named."""
        if self.model is None:
            raise UnsupportedError(NO_MODEL)
        return options.but(instead=self.model)
