"""python -m optigpu.backends.executorch.export: writes one program for ExecuTorch, with XNNPACK's operators.

A process of its own, so that the measuring process holds no second copy of the model. The exit status is 0 when the
file is written, REFUSED when the model cannot be exported (the last line of stdout says why).
"""

import argparse
import sys
from pathlib import Path

from optigpu.backends.converted import written
from optigpu.vocabulary import UnsupportedError


def main() -> int:
    """Writes the file."""
    parser = argparse.ArgumentParser(prog="python -m optigpu.backends.executorch.export", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="the file to write")
    parser.add_argument("--model", required=True, help="a reference")
    parser.add_argument("--seed", type=int, default=0, help="of a preset's random weights")
    parser.add_argument("--rows", type=int, required=True, help="how many sequences")
    parser.add_argument("--length", type=int, required=True, help="the most tokens of each")
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
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
    from optigpu.models.loading.load import load_model
    from optigpu.models.reference import parse_reference

    torch.set_num_threads(threads)
    rows, length = shape
    loaded = load_model(parse_reference(model), device="cpu", dtype="float32", attention="eager", seed=seed)
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
