"""The folder of safetensors that an engine reads a model from which knows the hub's format itself.

python -m optigpu.backends.export writes a preset as such a folder.
"""

import sys
from collections.abc import Callable
from pathlib import Path

from optigpu.backends.base import Order
from optigpu.backends.converted import Converter, converter_parser, model_arguments, require_space, written
from optigpu.models.held import CONFIGURATION, sound_directory
from optigpu.models.reference import BUNDLED, parse_reference
from optigpu.vocabulary import UnsupportedError


def folder_of(engine: str, order: Order, progress: Callable[[str], None]) -> Path:
    """A trained model's own folder; that of a preset is written for the engine, with its random weights.

    Raises UnsupportedError for a model that is not on this machine.
    """
    reference = order.reference
    if reference.kind == "bundled":
        return BUNDLED[reference.name]
    if reference.kind == "path":
        return sound_directory(reference)
    if reference.kind == "preset":
        libraries, doing = ("torch", "transformers"), "writing the model's folder"
        converter = Converter(engine, "optigpu.backends.export", ".folder", (Path(__file__),), libraries)
        return converter.made(order, "safetensors", model_arguments(order), progress, doing)
    from huggingface_hub import try_to_load_from_cache  # only a hub's model needs it

    found = try_to_load_from_cache(reference.name, CONFIGURATION, revision=reference.revision or "main")
    if not isinstance(found, str):
        raise UnsupportedError(
            f"The hub's cache does not hold {reference}; load the model once with the backend torch."
        )
    return Path(found).parent


def main() -> int:
    """Writes the folder."""
    options = converter_parser("optigpu.backends.export", __doc__, "folder").parse_args()

    def write() -> None:
        import torch

        from optigpu.models.loading.load import count_weights, load_model

        torch.set_num_threads(options.threads)
        reference = parse_reference(options.model)
        loaded = load_model(reference, device="cpu", dtype="float32", seed=options.seed)
        options.output.mkdir()
        require_space(options.output, torch.float32.itemsize * count_weights(loaded))
        loaded.save_pretrained(options.output)

    return written(write, options.output)


if __name__ == "__main__":
    sys.exit(main())
