"""The options of a resolved stack, collected from its techniques in the order of the phases."""

from functools import reduce

from optigpu.techniques.base import CacheOptions, LoadOptions, ModeOptions, Technique


def load_options(stack: tuple[Technique, ...]) -> LoadOptions:
    return reduce(lambda options, technique: technique.load(options), stack, LoadOptions())


def cache_options(stack: tuple[Technique, ...]) -> CacheOptions:
    return reduce(lambda options, technique: technique.cache(options), stack, CacheOptions())


def mode_options(stack: tuple[Technique, ...]) -> ModeOptions:
    return reduce(lambda options, technique: technique.execution(options), stack, ModeOptions())


def overriding(stack: tuple[Technique, ...], *hooks: str) -> list[str]:
    """The names of the techniques that override one of these hooks."""
    return [technique.name for technique in stack if any(map(technique.overrides, hooks))]
