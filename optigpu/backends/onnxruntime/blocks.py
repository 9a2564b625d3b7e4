"""Matrices as MatMulNBits reads them: whole numbers of 4 or 8 bits in groups that share a scale."""

import numpy as np
from numpy.typing import NDArray
from onnxruntime.capi._pybind_state import quantize_matmul_4bits, quantize_matmul_8bits

Floats = NDArray[np.float32]
Packed = NDArray[np.uint8]


def quantized(weight: Floats, bits: int, group: int) -> tuple[Packed, Floats]:
    """Numbers [outputs, groups, bytes of a group] and scales [outputs, groups] of a matrix [outputs, inputs].

    ONNX Runtime's own rounding, symmetric: the largest number of a group decides its scale, and the middle of the
    range stands for zero. The last group of a row is filled up with zeros.
    """
    outputs, inputs = weight.shape
    groups = -(-inputs // group)
    columns = np.zeros((groups * group, outputs), np.float32)
    columns[:inputs] = weight.T
    numbers = np.zeros((outputs, groups, group * bits // 8), np.uint8)
    scales = np.zeros((outputs, groups), np.float32)
    offsets = np.zeros((outputs, -(-groups * bits // 8)), np.uint8)
    quantize = quantize_matmul_4bits if bits == 4 else quantize_matmul_8bits
    quantize(numbers, columns, scales, offsets, group, outputs, inputs, True)
    return numbers, scales
