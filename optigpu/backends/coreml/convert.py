"""python -m optigpu.backends.coreml.convert: writes one Core ML package of a whole forward pass into a folder.

It converts on Linux as well, where nothing can run what it wrote.
"""

import sys
from pathlib import Path

from optigpu.backends.converter_program import require_space, written
from optigpu.backends.fixed_shapes import fixed_shape_parser
from optigpu.vocabulary import UnsupportedError

PACKAGE = "model.mlpackage"
"""In the folder: coremltools saves a package under no other ending."""


def main() -> int:
    """Writes the package."""
    options = fixed_shape_parser("optigpu.backends.coreml.convert", __doc__, "folder").parse_args()
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

    from optigpu.backends.coreml.whole_pass import WholePass, traced
    from optigpu.backends.traced import require_same, window_of
    from optigpu.models.loading.load import count_weights, load_model
    from optigpu.models.reference import parse_reference

    torch.set_num_threads(threads)
    loaded = load_model(parse_reference(model), device="cpu", dtype="float32", attention="eager", seed=seed)
    whole = WholePass(loaded, shape[1], window_of(loaded, "coreml"))
    ids = torch.linspace(0, loaded.config.vocab_size - 1, shape[1]).long().expand(shape)
    output.mkdir()
    require_space(output, torch.float32.itemsize * count_weights(loaded))
    try:
        graph = traced(whole, *shape)
        with torch.no_grad():
            require_same(graph(ids), loaded(input_ids=ids, use_cache=False).logits, loaded, "coreml")
        package = coremltools.convert(
            graph,
            inputs=[coremltools.TensorType(name="ids", shape=shape, dtype=np.int32)],
            outputs=[coremltools.TensorType(name="logits", dtype=np.float32)],
            compute_precision=coremltools.precision.FLOAT32,
            minimum_deployment_target=coremltools.target.macOS14,
        )
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UnsupportedError(f"{model} cannot be converted for Core ML: {why[:300]}") from error
    package.save(str(output / PACKAGE))


if __name__ == "__main__":
    sys.exit(main())
