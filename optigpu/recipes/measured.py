"""The job that compares a recipe's model with its teacher: speed side by side, and divergence from the teacher."""

from optigpu.job.spec import JobSpec
from optigpu.recipes.request import RecipeOutcome
from optigpu.vocabulary import DeviceKind


def comparison_of(outcome: RecipeOutcome, device: DeviceKind, replicates: int) -> JobSpec:
    """A ladder of one rung, whose processes take turns: the teacher, and the smaller model in its place.

    The model's folder must lie in the model directory.
    """
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
