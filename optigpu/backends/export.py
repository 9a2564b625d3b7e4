"""python -m optigpu.backends.export: writes a preset as a folder of safetensors."""

import sys
from pathlib import Path

from optigpu.backends.converter_program import converter_parser, require_space, written


def main() -> int:
    """Writes the folder."""
    options = converter_parser("optigpu.backends.export", __doc__, "folder").parse_args()

    def write() -> None:
        export(options.model, options.output, options.seed, options.threads)

    return written(write, options.output)


def export(model: str, output: Path, seed: int, threads: int) -> None:
    """Draws the weights from `seed` in float32 and writes them with their configuration.

    Raises UnsupportedError for a model that cannot be had here.
    """
    import torch

    from optigpu.models.loading.load import count_weights, load_model
    from optigpu.models.reference import parse_reference

    torch.set_num_threads(threads)
    loaded = load_model(parse_reference(model), device="cpu", dtype="float32", seed=seed)
    output.mkdir()
    require_space(output, torch.float32.itemsize * count_weights(loaded))
    loaded.save_pretrained(output)


if __name__ == "__main__":
    sys.exit(main())
