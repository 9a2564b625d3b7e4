"""The folder of safetensors that an engine reads a model from which knows the hub's format itself."""

from collections.abc import Callable
from pathlib import Path

from optigpu.backends import export
from optigpu.backends.base import Order
from optigpu.backends.converted import Converter
from optigpu.backends.converter_program import model_arguments
from optigpu.models.files import sound_directory
from optigpu.models.held import CONFIGURATION
from optigpu.models.reference import BUNDLED, parse_reference
from optigpu.vocabulary import UnsupportedError


def folder_of(engine: str, order: Order, progress: Callable[[str], None]) -> Path:
    """A trained model's own folder; that of a preset is written for the engine, with its random weights.

    Raises UnsupportedError for a model that is not on this machine.
    """
    reference = parse_reference(str(order.model))
    if reference.kind == "bundled":
        return BUNDLED[reference.name]
    if reference.kind == "path":
        return sound_directory(reference)
    if reference.kind == "preset":
        doing = "writing the model's folder"
        return _converter(engine).made(order, "safetensors", model_arguments(order), progress, doing)
    from huggingface_hub import try_to_load_from_cache  # only a hub's model needs it

    found = try_to_load_from_cache(reference.name, CONFIGURATION, revision=reference.revision or "main")
    if not isinstance(found, str):
        raise UnsupportedError(
            f"The hub's cache does not hold {reference}; load the model once with the backend torch."
        )
    return Path(found).parent


def _converter(engine: str) -> Converter:
    return Converter(
        engine=engine,
        program=export.__name__,
        suffix=".folder",
        sources=(Path(export.__file__),),
        libraries=("torch", "transformers"),
    )
