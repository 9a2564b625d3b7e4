"""The entry of the programs: `main("build")` or `main("evaluate")`, called with the descriptor to answer on."""

from .answers import Answers, RefusalError, Request, run

INSTALL = 'pip install -e ".[hardware]"'


def main(step: str) -> None:
    """Runs one program."""
    run(_build if step == "build" else _evaluate)


def _build(request: Request, answers: Answers) -> Request:
    answers.doing("loading TensorFlow")
    try:
        from .build import build
    except ImportError as error:
        raise RefusalError(_missing(error)) from None
    return build(request, answers)


def _evaluate(request: Request, answers: Answers) -> Request:
    try:
        from .evaluate import evaluate
    except ImportError as error:
        raise RefusalError(_missing(error)) from None
    return evaluate(request, answers)


def _missing(error: ImportError) -> str:
    return (
        f"Converting needs TensorFlow, LiteRT and TFLite Micro, and this Python lacks {error.name or error}: "
        f"{INSTALL}, or name another Python with --python."
    )
