"""The decoder's Triton kernels compiled for a Hopper GPU, and what must be in the code; see triton_decode.py."""

import re
from typing import Any

import pytest
import torch
from triton import JITFunction
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from optigpu.ops.decode.cuda import triton_attention, triton_linear, triton_steps
from optigpu.ops.decode.cuda.decoder import CudaDecoder
from optigpu.ops.decode.cuda.packing import pack_for_cuda
from optigpu.ops.decode.cuda.triton_linear import LOADS, LaunchTarget, launch_of, matrix_flags, norm_flags
from optigpu.ops.decode.program import Matrix, Norm, WeightKind
from optigpu.vocabulary import UnsupportedError
from tests.engine.triton_decode import tiny_program

H200 = LaunchTarget(132 * triton_linear.WARPS_A_MULTIPROCESSOR, dp4a=True)
KINDS: tuple[WeightKind, ...] = ("w4", "w8", "bf16")
POINTERS = {
    "tokens": "*i64",
    "chosen": "*i64",
    "position": "*i32",
    "not_finite": "*i32",
    "best_index": "*i32",
    "scale": "*i8",
    "gate_scale": "*i8",
    "unit": "*bf16",
    "gate_unit": "*bf16",
    "embedding": "*bf16",
    "keys": "*bf16",
    "values": "*bf16",
}
"""All other pointers of the kernels are to float32."""
SCALARS = ("rows", "outputs", "width", "first_head", "heads", "kv_heads", "capacity", "programs")


def every_kernel() -> None:
    """Each kernel in the forms that the models ask for; the products of an 8B model by what must be in their loops."""
    vector = torch.empty(0)
    rms, layer = Norm("rms", vector, None, 1e-5), Norm("layer", vector, vector, 1e-5)
    eight = {kind: matrix(kind, 6144, 4096) for kind in KINDS}
    for gated in eight.values():
        code = linear(gated, rms, streams=2, GATED=True, ACTIVATION="silu")
        assert_streams(code, gated)
    assert_streams(linear(matrix("w4", 4096, 14336), None, INTO="add"), matrix("w4", 4096, 14336))
    assert_streams(linear(matrix("w8", 128256, 4096), rms, BEST=True), matrix("w8", 128256, 4096))
    linear(matrix("w8", 3072, 768), layer, rows=4, ACTIVATION="gelu_tanh")
    linear(
        matrix("bf16", 768, 3072), None, rows=2, GATED=True, GATE_BIAS=True, ACTIVATION="gelu", INTO="times"
    )
    linear(matrix("w4", 96, 64), None, LaunchTarget(4, dp4a=False), ACTIVATION="relu")
    assert_streams(heads(eight["w4"], rms, 128, INT8=False), eight["w4"])
    heads(eight["bf16"], rms, 128, INT8=True)
    heads(matrix("w8", 2304, 768), layer, 64, rows=2, ROTARY=False, INT8=False)
    attend(False, 4, 128, 0)
    attend(True, 3, 80, 4096, kv_heads=1)
    compiled(triton_attention._join, {"HEAD": 80, "PADDED": 128, "PARTS": 16})
    compiled(triton_steps._embed, {"POSITIONS": True, "BLOCK": 1024}, {"positions": "*fp32"})
    compiled(triton_steps._choose, {"BLOCK": 1024})


def no_decoder_without_a_gpu() -> None:
    """Nor an interpreter."""
    with pytest.raises(UnsupportedError, match="needs an NVIDIA GPU"):
        CudaDecoder(tiny_program(pack_for_cuda, "gpt2", ("bf16",)))


def linear(
    matrix: Matrix,
    norm: Norm | None,
    target: LaunchTarget = H200,
    rows: int = 1,
    streams: int = 1,
    **chosen: Any,
) -> str:
    plain = {"GATED": False, "GATE_BIAS": False, "ACTIVATION": "none", "INTO": "store", "BEST": False}
    return product(triton_linear._linear, matrix, norm, target, rows, streams, plain | chosen)


def heads(matrix: Matrix, norm: Norm, size: int, rows: int = 1, **chosen: Any) -> str:
    flags = {"HEAD": size, "ROTARY": True} | chosen
    return product(triton_steps._query_key_value, matrix, norm, H200, rows, 2, flags)


def product(
    kernel: JITFunction,
    matrix: Matrix,
    norm: Norm | None,
    target: LaunchTarget,
    rows: int,
    streams: int,
    chosen: dict[str, Any],
) -> str:
    launch = launch_of(matrix, matrix.outputs, rows, target, streams)
    flags = matrix_flags(matrix, target) | norm_flags(norm) | {"ROWS": launch.rows, "TILE": launch.tile}
    numbers = "*bf16" if matrix.kind == "bf16" else "*i32"
    types = {"numbers": numbers, "gate_numbers": numbers, "epsilon": "fp32"}
    one = {"rows": 1} if rows == 1 else {}  # as at a launch, where a one is compiled in
    return compiled(kernel, flags | chosen | one, types, launch.warps)


def attend(int8: bool, sharing: int, size: int, window: int, **chosen: int) -> None:
    flags = {"WINDOW": window, "SHARING": sharing, "MEMBERS": 4, "HEAD": size, "PADDED": 128, "INT8": int8}
    flags["TOKENS"] = triton_attention.tokens_at_once(sharing, size)
    types = dict.fromkeys(("keys", "values"), "*i8" if int8 else "*bf16") | {"scale": "fp32"}
    compiled(triton_attention._attend, flags | chosen, types)


def compiled(
    kernel: JITFunction, chosen: dict[str, Any], types: dict[str, str] | None = None, warps: int = 4
) -> str:
    """The PTX of a kernel that could be assembled; pointers are aligned as torch's are."""
    known = POINTERS | dict.fromkeys(SCALARS, "i32") | (types or {}) | dict.fromkeys(chosen, "constexpr")
    signature = {parameter.name: known.get(parameter.name, "*fp32") for parameter in kernel.params}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, type_ in enumerate(signature.values())
        if type_[0] == "*"
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=chosen, attrs=aligned)
    done = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    assert done.asm["cubin"]
    return str(done.asm["ptx"])


def assert_streams(ptx: str, matrix: Matrix) -> None:
    """In its loop a thread asks for LOADS times 16 bytes of weights at least, before it multiplies, and with dp4a."""
    loop = max(loops(ptx), key=len)
    loads = [match.start() for match in re.finditer(r"ld\.global\.v4\.b32", loop)]
    assert len(loads) >= LOADS, len(loads)
    multiplication = "fma.rn.f32" if matrix.kind == "bf16" else "dp4a.s32.s32"
    assert loads[LOADS - 1] < loop.index(multiplication)


def loops(ptx: str) -> list[str]:
    """The code between a label and a jump back to it."""
    found = []
    for label in re.finditer(r"^(\$L__BB\w+):", ptx, re.MULTILINE):
        jump = re.compile(rf"bra\S*\s+{re.escape(label[1])};").search(ptx, label.end())
        if jump:
            found.append(ptx[label.end() : jump.start()])
    return found


def matrix(kind: WeightKind, outputs: int, inputs: int) -> Matrix:
    """Of which only the shape counts."""
    bias = None if inputs == 4096 else torch.empty(0)
    return Matrix(kind, outputs, inputs, 0 if kind == "bf16" else 32, torch.empty(0), None, bias)
