"""python -m optigpu.backends.coreml.convert: writes one Core ML package of a whole forward pass.

It converts on Linux as well, where nothing can run what it wrote.
"""

import sys
from pathlib import Path

from optigpu.backends.converter_program import written
from optigpu.backends.fixed_shapes import fixed_shape_parser
from optigpu.vocabulary import UnsupportedError


def main() -> int:
    """Writes the package."""
    options = fixed_shape_parser("optigpu.backends.coreml.convert", __doc__, "package").parse_args()
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
