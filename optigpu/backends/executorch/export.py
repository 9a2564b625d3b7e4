"""python -m optigpu.backends.executorch.export: writes one program for ExecuTorch, with XNNPACK's operators."""

import sys
from pathlib import Path

from optigpu.backends.converter_program import written
from optigpu.backends.fixed_shapes import fixed_shape_parser
from optigpu.vocabulary import UnsupportedError


def main() -> int:
    """Writes the file."""
    options = fixed_shape_parser("optigpu.backends.executorch.export", __doc__, "file").parse_args()
    shape = (options.rows, options.length)

    def write() -> None:
        export(options.model, options.output, options.seed, shape, options.threads)

    return written(write, options.output)


def export(model: str, output: Path, seed: int, shape: tuple[int, int], threads: int) -> None:
    """Exports a model with a static cache for `shape` [rows, length]; the number of tokens of a pass stays free.

    Raises UnsupportedError for a model that cannot be had here or cannot be exported.
    """
    import torch
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower
    from torch.export import Dim

    from optigpu.backends.executorch.cached import Cached
    from optigpu.backends.traced import require_traceable
    from optigpu.models.loading.load import load_model
    from optigpu.models.reference import parse_reference

    torch.set_num_threads(threads)
    rows, length = shape
    loaded = load_model(parse_reference(model), device="cpu", dtype="float32", attention="eager", seed=seed)
    require_traceable(loaded.config, "executorch")
    tokens = Dim("tokens", min=1, max=length - 1)
    example = (torch.zeros((rows, 4), dtype=torch.long), torch.arange(4))
    try:
        with torch.no_grad():
            module = Cached(loaded, rows, length)
            free = ({1: tokens}, {0: tokens})
            exported = torch.export.export(module, example, dynamic_shapes=free, strict=False)
            lowered = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()])
            program = lowered.to_executorch()
    except (AssertionError, RuntimeError, ValueError, NotImplementedError) as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UnsupportedError(f"{model} cannot be exported for ExecuTorch: {why[:300]}") from error
    output.write_bytes(program.buffer)


if __name__ == "__main__":
    sys.exit(main())
