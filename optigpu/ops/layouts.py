"""How many bytes a quantized weight takes, by the layouts in which operators store it. Loads no torch.

On a CPU they are those of our C++ operators, whose tiles are filled up with zeros; on CUDA those of torch's and of our
own kernels. `outputs` and `inner` are the sizes of a weight [outputs, inner].
"""

from typing import Literal

from optigpu.ops.decode.program import CacheKind, WeightKind
from optigpu.vocabulary import DeviceKind

INT8_TILE = 16
"""Outputs that the C++ operator of int8_linear computes together; kTile in int8_linear.cpp."""
DYNAMIC_TILE, DYNAMIC_GROUP = 32, 4
"""Outputs and inputs that the weights of int8_dynamic hold together; kTile and kGroup in int8_dynamic.cpp."""
DYNAMIC_CUDA_STEP = 8
"""torch._int_mm takes inputs and outputs that are multiples of this on CUDA."""
INT4_TILE = 32
"""Outputs that the C++ operator of int4_linear computes together; kTile in int4_linear.cpp."""
INT4_CUDA_OUTPUTS = 8
"""torch's int4 operator on CUDA needs a multiple of this many outputs."""
FP8_STEP = 16
"""torch._scaled_mm takes inputs and outputs that are multiples of this on CUDA."""
NF4_BLOCK = 64
"""Weights that share one statistic of bitsandbytes; a block may reach over the end of a row."""
NF4_NESTED_BLOCK = 256
"""Statistics that share one, where they are quantized as well."""
NF4_PACKED_OUTPUTS, NF4_PACKED_INPUTS = 32, 64
"""What the sizes of a layer must be multiples of for bitsandbytes' fused operator on CPUs."""
DECODE_TILE = 16
"""Outputs that the C++ operator of whole decode steps computes together; kBlockOutputs in interface.h."""
DECODE_ALIGNMENT = 64
"""Its tensors begin at multiples of this many bytes: a cache line, and the widest load."""
DECODE_BITS: dict[WeightKind, int] = {"w3k": 3, "w4": 4, "w4k": 4, "w5": 5, "w6": 6, "w8": 8, "bf16": 16}
"""Bits of a weight, without its share of a scale."""
KV_SCALE_BYTES = 4
"""The scale of a token and head in a cache of int8 or int4 keys and values."""
KV_VALUE_STEP, KV_INT4_KEY_STEP = 16, 32
"""What a head's values, and its 4-bit keys, are filled up to a multiple of for the C++ operator."""
_FLOAT, _HALF = 4, 2


def int8_bytes(outputs: int, inner: int, device: DeviceKind) -> int:
    """int8 numbers and a float32 scale for each output."""
    tile = INT8_TILE if device is DeviceKind.CPU else 1
    return _up(outputs, tile) * inner + _FLOAT * outputs


def int8_dynamic_bytes(outputs: int, inner: int, device: DeviceKind) -> int:
    """As `int8_bytes`, in the layout of products with int8 activations."""
    on_cpu = device is DeviceKind.CPU
    tile, step = (DYNAMIC_TILE, DYNAMIC_GROUP) if on_cpu else (DYNAMIC_CUDA_STEP, DYNAMIC_CUDA_STEP)
    return _up(outputs, tile) * _up(inner, step) + _FLOAT * outputs


def int4_bytes(outputs: int, inner: int, device: DeviceKind, *, group: int, offsets: bool, half: bool) -> int:
    """4-bit numbers with bfloat16 scales, and offsets where there are any; `half` says that the model is bfloat16."""
    packed_by_torch = device is DeviceKind.CUDA and half
    if device is DeviceKind.CPU:
        outputs = _up(outputs, INT4_TILE)
    elif packed_by_torch:
        outputs = _up(outputs, INT4_CUDA_OUTPUTS)
    statistics = 2 if offsets or packed_by_torch else 1
    return outputs * inner // 2 + _HALF * statistics * outputs * (inner // group)


def nf4_bytes(outputs: int, inner: int, device: DeviceKind, *, nested: bool, half: bool) -> int:
    """4-bit NormalFloat numbers with their statistics and tables of levels; `half` says that the model is bfloat16.

    On a CPU a bfloat16 layer whose sizes fit has the layout of bitsandbytes' fused operator, with bfloat16 statistics.
    """
    numbers, blocks = -(-outputs * inner // 2), -(-outputs * inner // NF4_BLOCK)
    levels = 16 * _FLOAT
    is_whole = not (outputs % NF4_PACKED_OUTPUTS or inner % NF4_PACKED_INPUTS)
    if device is DeviceKind.CPU and half and is_whole:
        return numbers + _HALF * blocks + levels
    if not nested:
        return numbers + _FLOAT * blocks + levels
    nested_blocks = -(-blocks // NF4_NESTED_BLOCK)
    return numbers + blocks + _FLOAT * nested_blocks + levels + _FLOAT + 256 * _FLOAT


def llm_int8_bytes(outputs: int, inner: int) -> int:
    """int8 numbers as bitsandbytes keeps them, and a float32 scale for each output."""
    return outputs * inner + _FLOAT * outputs


def fp8_bytes(outputs: int, inner: int) -> int:
    """e4m3 numbers, a float32 scale for each output, and a scale of one."""
    return _up(outputs, FP8_STEP) * _up(inner, FP8_STEP) + _FLOAT * outputs + _FLOAT


def decode_bytes(outputs: int, inner: int, device: DeviceKind, *, kind: WeightKind, group: int) -> int:
    """Numbers, scales of 8 bits and bfloat16 units of the outputs, as the operators of whole decode steps read them."""
    if device is DeviceKind.CPU:
        outputs = _up(outputs, DECODE_TILE)
    numbers = outputs * inner * DECODE_BITS[kind] // 8
    parts = (numbers,) if kind == "bf16" else (numbers, outputs * (inner // group), _HALF * outputs)
    return sum(_up(part, DECODE_ALIGNMENT) if device is DeviceKind.CPU else part for part in parts)


def finer_bytes(rows: int, inner: int, device: DeviceKind, *, kind: WeightKind, group: int) -> int:
    """Of so many finer rows of a head, with their numbers of 64 bits."""
    index = _up(8 * rows, DECODE_ALIGNMENT) if device is DeviceKind.CPU else 8 * rows
    return index + decode_bytes(rows, inner, device, kind=kind, group=group)


def kv_bytes(kind: CacheKind, head_size: int) -> tuple[int, int]:
    """Bytes of a token's keys and of its values in one head, as the C++ operator stores them, without scales."""
    values = _up(head_size, KV_VALUE_STEP)
    if kind == "int4":
        return _up(head_size, KV_INT4_KEY_STEP) // 2, values // 2
    size = _HALF if kind == "bf16" else 1
    return size * head_size, size * values


GgufBlock = Literal[
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0",
    "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS",
]  # fmt: skip
GGUF_BLOCKS: dict[GgufBlock, tuple[int, int]] = {
    "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2),
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34),
    "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
    "IQ4_NL": (32, 18), "IQ4_XS": (256, 136),
}  # fmt: skip
"""Weights of a block of llama.cpp's types, and the bytes of the block: ggml-common.h."""
GGUF_INSTEAD: dict[GgufBlock, GgufBlock] = {
    "Q2_K": "IQ4_NL", "Q3_K": "IQ4_NL", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL",
    "IQ4_NL": "F16", "Q4_0": "F16", "Q4_1": "F16", "Q5_0": "F16", "Q5_1": "F16", "Q8_0": "F16",
}  # fmt: skip
"""What llama.cpp writes where the inputs are not a multiple of a type's block."""


def gguf_bytes(outputs: int, inner: int, kind: GgufBlock) -> int:
    """Of a matrix in a GGUF file."""
    block, size = GGUF_BLOCKS[kind]
    if inner % block:
        return gguf_bytes(outputs, inner, GGUF_INSTEAD[kind])
    return outputs * inner // block * size


def nbits_bytes(outputs: int, inner: int, *, bits: int, group: int) -> int:
    """Of a matrix as ONNX Runtime's MatMulNBits reads it: numbers in whole groups, each with a float32 scale."""
    groups = _up(inner, group) // group
    return outputs * groups * (group * bits // 8 + _FLOAT)


OPENVINO_LEAST_GROUP = 32
"""The smallest group that NNCF makes of a row which the asked-for one does not divide."""


def openvino_int8_bytes(outputs: int, inner: int, *, offsets: bool) -> int:
    """NNCF's layout: int8 numbers with a float16 scale for each output, and an offset of 8 bits where there is one."""
    return outputs * inner + (_HALF + offsets) * outputs


def openvino_int4_bytes(outputs: int, inner: int, *, group: int, offsets: bool) -> int:
    """NNCF's layout: 4-bit numbers with a float16 scale for each group, and an offset of 4 bits where there is one.

    `group` 0 is a whole row. Rows that no group divides have 8 bits.
    """
    size = group or inner
    if inner % size:
        size = inner & -inner
        if size < OPENVINO_LEAST_GROUP:
            return openvino_int8_bytes(outputs, inner, offsets=True)
    groups = outputs * (inner // size)
    return -(-outputs * inner // 2) + _HALF * groups + (-(-groups // 2) if offsets else 0)


def _up(size: int, step: int) -> int:
    return -(-size // step) * step
