"""python -m optigpu.child.recipe: the process that makes a smaller model.

It reads one `RunRecipe` from stdin, and answers `Progress`, then `RecipeMade`, `Refused` or `Broken`, as
`optigpu.child.connection` says.
"""

from typing import NoReturn

from optigpu.backends import BACKENDS
from optigpu.child.connection import Tell, broken, connect
from optigpu.child.messages import Progress, RecipeMade, Refused, RunRecipe
from optigpu.selftest.setting import PLAIN_BACKEND
from optigpu.vocabulary import SpecError, UnsupportedError


def main() -> NoReturn:
    """Answers each order, for ever: the thread that reads stdin ends the process."""
    lines, tell = connect("optigpu.child.recipe", "Makes a smaller model.")
    while True:
        line = lines.get()
        try:
            tell(made(RunRecipe.model_validate_json(line), tell))
        except (SpecError, UnsupportedError) as error:
            tell(Refused(reason=str(error)))
        except Exception as error:
            tell(broken(error))


def made(order: RunRecipe, tell: Tell) -> RecipeMade:
    """Makes it. Raises what `make` raises."""
    BACKENDS[PLAIN_BACKEND].use_threads(order.threads)
    from optigpu.recipes.making.make import make  # a torch that cannot be loaded is an answer as well

    return RecipeMade(outcome=make(order.request, lambda doing: tell(Progress(doing=doing))))


if __name__ == "__main__":
    main()
