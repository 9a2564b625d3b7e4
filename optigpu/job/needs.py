"""What a job asks for of the worker that takes it."""

from collections.abc import Iterable

from optigpu.documents.views import Want
from optigpu.job.spec import JobSpec, PlanName, resolve
from optigpu.models.described import facts_of
from optigpu.models.held import FILES
from optigpu.models.reference import parse_reference
from optigpu.surgery.extras import install_command
from optigpu.vocabulary import Frozen

HUB, FOLDER = "hub:", "path:"
"""How references begin that not every worker can load."""


class Need(Frozen):
    """One thing that a worker must have. `name` is as in `optigpu.documents.views.Unserved`."""

    kind: Want
    name: str

    @property
    def next_step(self) -> str:
        match self.kind:
            case Want.DEVICE:
                return f"Start one with `python -m worker --device {self.name}` on a machine that has it."
            case Want.GPU:
                return "Name one of them in target.gpu, or start a worker that has it."
            case Want.MEMORY:
                return "Ask for less in target.min_vram_bytes, or start a worker that has it."
            case Want.PACKAGE:
                how = install_command(self.name)
                return f"Install it where a worker runs, with: {how}; then start that worker again."
            case Want.MODEL if self.name.startswith(FOLDER):
                what = "file" if self.name.endswith(tuple(FILES)) else "folder"
                return f"Put the {what} there; a worker without a job finds it within seconds."
            case Want.MODEL:
                return "Put it into a worker's cache, or start a worker without HF_HUB_OFFLINE."
            case _:
                return "Install what it needs where a worker runs, then start that worker again."


def needs_of(spec: JobSpec) -> tuple[Need, ...]:
    """Each thing once without which the job's own stack cannot be measured. A worker need not have what only a stack
    `beside` it asks for: without it that variant alone ends `unsupported`."""
    # A search goes on without the stacks that a worker cannot run.
    stack = () if spec.plan is PlanName.SEARCH else resolve(spec.stack, spec.workload.kind)
    facts = [facts_of(parse_reference(model)) if model else None for model in spec.asked_models]
    packages = (package for known in facts for technique in stack for package in technique.packages(known))
    # the models and those that techniques name, such as a draft, without those that are everywhere
    values = (value for technique in stack for value in technique.model_dump().values())
    names = (name for name in (*spec.asked_models, *values) if isinstance(name, str))
    asked: dict[Want, Iterable[str]] = {
        Want.BACKEND: (spec.backend,),
        Want.PACKAGE: packages,
        Want.MODEL: (name for name in names if name.startswith((HUB, FOLDER))),
    }
    return tuple(Need(kind=kind, name=name) for kind, each in asked.items() for name in dict.fromkeys(each))
