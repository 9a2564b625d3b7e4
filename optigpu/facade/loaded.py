"""Where a model that the facade loaded came from, for as long as it lives."""

from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

from optigpu.techniques.base import Technique

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Origin(NamedTuple):
    """The reference that was loaded, the techniques that changed it, and the number of its weights before they did."""

    reference: str
    stack: tuple[Technique, ...]
    weights: int


_ORIGINS: "WeakKeyDictionary[PreTrainedModel, Origin]" = WeakKeyDictionary()


def remember(model: "PreTrainedModel", origin: Origin) -> None:
    """Notes the origin of a model that was loaded just now."""
    _ORIGINS[model] = origin


def origin_of(model: "PreTrainedModel") -> Origin | None:
    """The origin of a model; None for one that the facade has not loaded."""
    return _ORIGINS.get(model)
