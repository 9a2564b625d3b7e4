"""`python -m tools.gpu_quarter.kernels DEVICE ROWS FILE`: bandwidth of the fused norms and activations beside torch's.

Each reads and writes its operands once at best; `share` is of what a large copy moves in the same run.
"""

import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.functional import gelu, layer_norm, rms_norm, silu

from benchmarks.document import write
from benchmarks.gpu_decode import copy_bandwidth, seconds_of
from optigpu.ops.activation.fused_activation import bias_gelu, swiglu
from optigpu.ops.norm.fused_norm import add_layer_norm, add_rms_norm

WIDTH = 4096
WARM_UPS, TURNS = 3, 20


def main(device: str, rows: int, path: Path) -> int:
    """Prints and writes a line for each kernel."""
    bandwidth = copy_bandwidth(device)
    lines = []
    for name, (run, moved) in kernels(device, rows).items():
        seconds = [seconds_of(run) for _ in range(WARM_UPS + TURNS)]
        rate = moved / statistics.median(seconds[WARM_UPS:])
        lines.append({"kernel": name, "bytes": moved, "bytes_per_s": rate, "share": rate / bandwidth})
        print(f"{name}: {rate / 1e9:.1f} GB/s, {rate / bandwidth:.0%} of a copy")
    write(path, "kernels", {"bandwidth": bandwidth, "width": WIDTH, "rows": rows, "kernels": lines})
    return 0


def kernels(device: str, rows: int) -> dict[str, tuple[Callable[[], object], int]]:
    """What is run, and the least bytes that it moves, in bfloat16."""
    options = {"device": device, "dtype": torch.bfloat16}
    x, residual = (torch.randn(rows, WIDTH, **options) for _ in range(2))
    pair, weight, bias = (torch.randn(*shape, **options) for shape in ((rows, 2 * WIDTH), (WIDTH,), (WIDTH,)))
    one = x.nbytes
    shape = (WIDTH,)
    return {
        "add_layer_norm": (lambda: add_layer_norm(x, residual, weight, bias, 1e-5), 4 * one),
        "layer norm of torch": (lambda: layer_norm(x + residual, shape, weight, bias), 4 * one),
        "add_rms_norm": (lambda: add_rms_norm(x, residual, weight, 1e-5), 4 * one),
        "RMS norm of torch": (lambda: rms_norm(x + residual, shape, weight, 1e-5), 4 * one),
        "bias_gelu": (lambda: bias_gelu(x, bias, "tanh"), 2 * one),
        "GELU of torch": (lambda: gelu(x + bias, approximate="tanh"), 2 * one),
        "swiglu": (lambda: swiglu(pair), 3 * one),
        "SwiGLU of torch": (lambda: silu(pair[:, :WIDTH]) * pair[:, WIDTH:], 3 * one),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])))
