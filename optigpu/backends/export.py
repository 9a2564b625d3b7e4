"""python -m optigpu.backends.export: writes a preset as a folder of safetensors.

A process of its own, so that what it takes is no part of the measuring process's peak memory. The exit status is 0 when
the folder is written, REFUSED when the model cannot be written (the last line of stdout says why).
"""

import argparse
import sys
from pathlib import Path

from optigpu.backends.converted import written


def main() -> int:
    """Writes the folder."""
    parser = argparse.ArgumentParser(prog="python -m optigpu.backends.export", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="the folder to write")
    parser.add_argument("--model", required=True, help="a reference to a preset")
    parser.add_argument("--seed", type=int, default=0, help="of its random weights")
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()

    def write() -> None:
        export(options.model, options.output, options.seed, options.threads)

    return written(write, options.output)


def export(model: str, output: Path, seed: int, threads: int) -> None:
    """Draws the weights from `seed` in float32 and writes them with their configuration.

    Raises UnsupportedError for a model that cannot be had here.
    """
    import torch

    from optigpu.models.loading.load import load_model
    from optigpu.models.reference import parse_reference

    torch.set_num_threads(threads)
    load_model(parse_reference(model), device="cpu", dtype="float32", seed=seed).save_pretrained(output)


if __name__ == "__main__":
    sys.exit(main())
