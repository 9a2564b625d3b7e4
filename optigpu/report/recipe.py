"""The table of a smaller model: what it lost against its teacher, before and after it was trained."""

from optigpu.recipes.request import RecipeOutcome
from optigpu.report.formats import Column, Grid
from optigpu.report.numbers import short


def recipe_grid(outcome: RecipeOutcome) -> Grid:
    """A row for the teacher, for the smaller model as it began, and as it ended."""
    request = outcome.request
    teacher = (request.model, f"{outcome.teacher_parameters:,}", short(outcome.teacher_perplexity), "0")
    began = (
        "smaller, untrained",
        f"{outcome.parameters:,}",
        short(outcome.perplexity_before),
        short(outcome.kld_before),
    )
    ended = ("smaller, trained", f"{outcome.parameters:,}", short(outcome.perplexity), short(outcome.kld))
    columns = ("weights", "perplexity", "KLD (nat)")
    return Grid(
        title=f"{request.recipe}: {outcome.changed}",
        columns=(Column("model"), *(Column(name, right=True) for name in columns)),
        rows=(teacher, began, ended),
        notes=(
            "On text that the larger model wrote and that was not trained on; its own perplexity is the least possible "
            "on average.",
            f"{request.steps} steps of {request.batch_size} texts, {outcome.seconds:.0f} s in all.",
            f"Written to {request.output}: set OPTIGPU_MODELS_DIR={request.output.parent} and name it "
            f"path:{request.output.name}.",
        ),
    )
