"""`python -m tools.gpu_quarter.kernels DEVICE ROWS FILE`: what fused norms and activations move."""

import statistics
import sys
from pathlib import Path

import torch

from benchmarks.document import write
from benchmarks.gpu_decode import copy_bandwidth, seconds_of
from optigpu.ops.activation.fused_activation import bias_gelu, swiglu
from optigpu.ops.norm.fused_norm import add_layer_norm, add_rms_norm

WIDTH, WARM_UPS, TURNS = 4096, 3, 20


def main(device: str, rows: int, path: Path) -> int:
    """Bytes/s of each, of the least that it must move, and their share of what a large copy moves in the same run."""
    shapes = ((rows, WIDTH), (rows, WIDTH), (rows, 2 * WIDTH), (WIDTH,), (WIDTH,))
    x, y, pair, weight, bias = (torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes)
    kernels = {
        "add_layer_norm": (4, lambda: add_layer_norm(x, y, weight, bias, 1e-5)),
        "add_rms_norm": (4, lambda: add_rms_norm(x, y, weight, 1e-5)),
        "bias_gelu": (2, lambda: bias_gelu(x, bias, "tanh")),
        "swiglu": (3, lambda: swiglu(pair)),
    }
    bandwidth, rates = copy_bandwidth(device), {}
    for name, (matrices, run) in kernels.items():
        seconds = [seconds_of(run) for _ in range(WARM_UPS + TURNS)]
        rates[name] = matrices * x.nbytes / statistics.median(seconds[WARM_UPS:])
    write(path, "kernels", {"bandwidth": bandwidth, "width": WIDTH, "rows": rows, "bytes_per_s": rates})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])))
