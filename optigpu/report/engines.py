"""The engines that have an environment of their own, as a table."""

from collections.abc import Sequence
from typing import TypedDict

from optigpu.engines.environments import EngineEnvironment
from optigpu.engines.recipes import RECIPES
from optigpu.report.formats import Column, Grid


class EngineFacts(TypedDict):
    """One engine; `folder` is where its environment is or would be."""

    name: str
    summary: str
    installed: bool
    minutes: int
    bytes: int
    folder: str
    command: str


def engine_facts() -> list[EngineFacts]:
    """Each engine that has an environment of its own."""
    environments = [EngineEnvironment(recipe) for recipe in RECIPES.values()]
    return [
        {
            "name": each.recipe.name,
            "summary": each.recipe.summary,
            "installed": each.is_whole,
            "minutes": each.recipe.minutes,
            "bytes": each.recipe.bytes,
            "folder": str(each.folder),
            "command": each.recipe.install_command,
        }
        for each in environments
    ]


def engines_grid(facts: Sequence[EngineFacts]) -> Grid:
    """With the command that makes each, or the folder that it is in."""
    return Grid(
        title="Engines with an environment of their own",
        columns=tuple(map(Column, ("engine", "what it is", "takes", "installed"))),
        rows=tuple(
            (
                fact["name"],
                fact["summary"],
                f"{fact['minutes']} minutes, {fact['bytes'] / 2**30:.1f} GiB",
                fact["folder"] if fact["installed"] else f"no: {fact['command']}",
            )
            for fact in facts
        ),
    )
