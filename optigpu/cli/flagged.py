"""Commands whose flags come from the job's models, which are imported only when the command is called.

JobSpec loads every technique, which `optigpu --help` need not wait for.
"""

from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, Signature, signature
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from optigpu.cli.flags import Flag

FlagValue = int | float | str | bool | list[str]
Given = Mapping[str, FlagValue]
"""The flags that were used, by their name."""

Panels = Mapping[str, Sequence["Flag"]]
"""The flags under each heading of the help."""


def job_panels() -> Panels:
    """Every flag of a job."""
    from optigpu.cli.flags import job_flags, section_flags, sections, workload_flags

    own = {"Job": job_flags(), "Workload": workload_flags()}
    return own | {_heading(section): section_flags(section) for section in sections()}


def ladder_panels() -> Panels:
    """Every flag of a job whose plan the command sets."""
    panels = job_panels()
    return {**panels, "Job": [flag for flag in panels["Job"] if flag.field != "plan"]}


def replay_panels() -> Panels:
    """The flags of `replay` that change how a result is measured again."""
    from optigpu.cli.flags import section_flags

    return {_heading(name): section_flags(name, with_defaults=False) for name in ("measure", "limits")}


def _heading(section: str) -> str:
    return {"measure": "Measurement", "target": "Worker"}.get(section, section.capitalize())


def add_flagged(app: typer.Typer, command: Callable[..., None], panels: Callable[[], Panels]) -> None:
    """Adds a command whose first parameter is the mapping of the flags that were used."""

    class Flagged(TyperCommand):
        """A placeholder that builds the command when it is called."""

        def make_context(self, *arguments: Any, **options: Any) -> Any:
            alone = typer.Typer(add_completion=False)
            alone.command(command.__name__)(_with_flags(command, panels()))
            return typer.main.get_command(alone).make_context(*arguments, **options)

    app.command(command.__name__, cls=Flagged, help=command.__doc__)(lambda: None)


def _with_flags(command: Callable[..., None], panels: Panels) -> Callable[..., None]:
    """The command with the flags in place of its first parameter."""
    flags = [flag.parameter(panel) for panel, flags in panels.items() for flag in flags]
    _, *own = signature(command).parameters.values()

    def with_flags(**values: object) -> None:
        given = {flag.name: values.pop(flag.name) for flag in flags}
        # typer gives an empty list for a repeated flag that was not used
        command({name: value for name, value in given.items() if value not in (None, [])}, **values)

    # those without a default first, as a signature needs them
    with_flags.__doc__ = command.__doc__
    with_flags.__dict__["__signature__"] = Signature(
        sorted([*flags, *own], key=lambda each: each.default is not Parameter.empty)
    )
    return with_flags
