"""What the libraries of a variant were built with; they are looked at after it was measured."""

from optigpu.documents.facts import BuildFacts, RunFacts
from optigpu.documents.result import Environment
from optigpu.engines.libraries import LIBRARIES, Machine, build_facts
from optigpu.job.spec import Variant
from optigpu.models.facts import facts_of
from optigpu.models.reference import parse_reference


def builds_of(variant: Variant, environment: Environment, facts: RunFacts) -> tuple[BuildFacts, ...]:
    """The engine's own library, then those of packages that its techniques compute with."""
    model = facts_of(parse_reference(variant.model)) if variant.model else None
    packages = [package for technique in variant.stack for package in technique.packages(model)]
    names = dict.fromkeys((variant.backend, *(package for package in packages if package in LIBRARIES)))
    gpu = next(iter(environment.gpus(variant.device)), None)
    machine = Machine(environment.cpu_features, gpu)
    told = facts.recorded.get(f"{variant.backend}_flags")
    found = (build_facts(name, machine, told if isinstance(told, str) else None) for name in names)
    return tuple(each for each in found if each)
