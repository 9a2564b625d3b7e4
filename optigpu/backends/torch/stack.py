"""The options of a resolved stack, collected from its techniques in the order of the phases."""

from optigpu.techniques.base import CacheOptions, LoadOptions, ModeOptions, Technique


def load_options(stack: tuple[Technique, ...]) -> LoadOptions:
    """How the weights of the stack are loaded."""
    options = LoadOptions()
    for technique in stack:
        options = technique.load(options)
    return options


def cache_options(stack: tuple[Technique, ...]) -> CacheOptions:
    """The key-value cache of the stack."""
    options = CacheOptions()
    for technique in stack:
        options = technique.cache(options)
    return options


def mode_options(stack: tuple[Technique, ...]) -> ModeOptions:
    """The contexts in which the stack's forward passes run."""
    options = ModeOptions()
    for technique in stack:
        options = technique.execution(options)
    return options


def overriding(stack: tuple[Technique, ...], *hooks: str) -> list[str]:
    """The names of the techniques that override one of these hooks."""
    return [
        technique.name
        for technique in stack
        if any(getattr(type(technique), hook) is not getattr(Technique, hook) for hook in hooks)
    ]
