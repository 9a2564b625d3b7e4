"""What a recipe is asked for, and what came of it."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

from pydantic import Field, field_validator

from optigpu.job.spec import JobSpec
from optigpu.models.reference import parse_reference, preset_of
from optigpu.vocabulary import DeviceKind, Frozen, RecipeName, SpecError, as_value_error

ABOUT = "recipe.json"
"""The file in the model's folder that says how it was made."""


class RecipeRequest(Frozen):
    """A smaller model, trained on text that its teacher writes."""

    recipe: RecipeName
    model: str = Field("bundled:tiny", description="The trained model to begin with.")
    output: Path
    layers: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="distillation: the layers that stay, half of them where none is given.",
    )
    keep: float = Field(
        0.5, gt=0, lt=1, description="structured_pruning: the share of each MLP's neurons that stays."
    )
    steps: int = Field(120, ge=0, le=1_000_000, description="Steps of training.")
    batch_size: int = Field(8, ge=1, le=4096, description="Texts of a step.")
    length: int = Field(128, ge=8, le=131072, description="Tokens of a text.")
    texts: int = Field(256, ge=1, le=1_000_000, description="Texts that the model writes to learn from.")
    learning_rate: float = Field(1e-3, gt=0, le=1, description="The highest learning rate.")
    seed: int = Field(0, ge=0, lt=2**63, description="What texts are drawn with.")

    @field_validator("model")
    @classmethod
    def _trained(cls, model: str) -> str:
        reference = as_value_error(parse_reference, model)
        if preset_of(reference) is not None:
            raise ValueError(
                f"{model} has random weights, from which there is nothing to learn; name a trained model, for example "
                "bundled:tiny"
            )
        return str(reference)


class RecipeOutcome(Frozen):
    """The model that was made, and how it compares with its teacher on text that neither was trained on here.

    The text was written by the teacher, so that its own perplexity is the least that is possible on average. `before`
    are those of the smaller model before it was trained.
    """

    request: RecipeRequest
    changed: str
    teacher_parameters: int
    parameters: int
    teacher_perplexity: float
    perplexity_before: float
    perplexity: float
    kld_before: float
    kld: float
    # Mean loss of the first and the last tenth of the steps; null without steps.
    first_loss: float | None
    last_loss: float | None
    seconds: float


def check_output(folder: Path) -> None:
    """Refuses a folder that cannot be written or that holds something else than a recipe's outcome. Raises
    SpecError."""
    parent = folder.resolve().parent
    if not os.path.isdir(parent):
        raise SpecError(f"output: there is no folder {parent}; make it first.")
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise SpecError(f"output: {folder} is a file; name a folder.")
    if os.path.isdir(folder) and any(folder.iterdir()) and not (folder / ABOUT).is_file():
        raise SpecError(f"output: {folder} holds files that no recipe wrote; name an empty or a new folder.")
    place = folder if os.path.isdir(folder) else parent
    try:
        # Asking for permissions is not enough: the superuser has them on a file system that takes no files as well.
        with TemporaryDirectory(prefix=f".{folder.name}-", dir=place):
            pass
    except OSError as error:
        raise SpecError(
            f"output: {place} cannot be written ({error.strerror}); name a folder of yours."
        ) from error


def comparison_of(outcome: RecipeOutcome, device: DeviceKind, replicates: int) -> JobSpec:
    """A ladder of one rung, whose processes take turns: the teacher, and the smaller model in its place. The model's
    folder must lie in the model directory."""
    request = outcome.request
    technique = {"name": "smaller_model", "model": f"path:{request.output.resolve().name}"}
    return JobSpec.model_validate(
        {
            "name": f"recipe: {request.recipe}",
            "workload": {"kind": "generate", "prompt_tokens": 32, "new_tokens": 32},
            "model": request.model,
            "plan": "ladder",
            "stack": [technique],
            "device": device,
            "seed": request.seed,
            "measure": {
                "replicates": replicates,
                "min_seconds": 1,
                "max_seconds": 5,
                "meters": ["latency", "memory", "quality"],
            },
            "tags": ["recipe", str(request.recipe)],
        }
    )
