"""python -m optigpu.backends.coreml.convert: writes one Core ML package of a whole forward pass.

It converts on Linux as well, where nothing can run what it wrote. The exit status is 0 when the package is written,
REFUSED when the model cannot be converted (the last line of stdout says why).
"""

import argparse
import sys
from pathlib import Path

from optigpu.backends.converted import written
from optigpu.vocabulary import UnsupportedError


def main() -> int:
    """Writes the package."""
    parser = argparse.ArgumentParser(prog="python -m optigpu.backends.coreml.convert", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="the package to write")
    parser.add_argument("--model", required=True, help="a reference")
    parser.add_argument("--seed", type=int, default=0, help="of a preset's random weights")
    parser.add_argument("--rows", type=int, required=True, help="how many sequences")
    parser.add_argument("--length", type=int, required=True, help="the tokens of each")
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    shape = (options.rows, options.length)

    def write() -> None:
        convert(options.model, options.output, options.seed, shape, options.threads)

    return written(write, options.output)


def convert(model: str, output: Path, seed: int, shape: tuple[int, int], threads: int) -> None:
    """Converts the pass over ids [rows, length] to the logits of each token, in float32.

    Raises UnsupportedError for a model that cannot be had here or cannot be converted.
    """
    import coremltools
    import numpy as np
    import torch

    from optigpu.models.loading.load import load_model
    from optigpu.models.reference import parse_reference

    class Whole(torch.nn.Module):
        """The pass without a cache: ids to logits."""

        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.inner(input_ids=ids, use_cache=False).logits
            return found

    torch.set_num_threads(threads)
    loaded = load_model(parse_reference(model), device="cpu", dtype="float32", attention="eager", seed=seed)
    with torch.no_grad():
        traced = torch.jit.trace(Whole(loaded).eval(), torch.zeros(shape, dtype=torch.int64))
    try:
        package = coremltools.convert(
            traced,
            inputs=[coremltools.TensorType(name="ids", shape=shape, dtype=np.int32)],
            outputs=[coremltools.TensorType(name="logits", dtype=np.float32)],
            compute_precision=coremltools.precision.FLOAT32,
            minimum_deployment_target=coremltools.target.macOS14,
        )
    except (RuntimeError, ValueError, NotImplementedError) as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UnsupportedError(f"{model} cannot be converted for Core ML: {why[:300]}") from error
    package.save(str(output))


if __name__ == "__main__":
    sys.exit(main())
