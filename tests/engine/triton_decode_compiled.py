"""What must be in the machine code of products that stream weights, compiled for a Hopper GPU; see triton_decode.py."""

import re

import pytest

from optigpu.hardware.catalog import capabilities
from optigpu.ops.decode.cuda.decoder import CudaDecoder
from optigpu.ops.decode.cuda.packing import pack_for_cuda
from optigpu.ops.kernel import Example
from optigpu.ops.launch import LOADS
from optigpu.vocabulary import UnsupportedError
from tests.engine.triton_decode import tiny_program
from tools.kernels.compiling import compiled, loops
from tools.kernels.sources import examples_of

(HOPPER,) = (each for each in capabilities() if each.name == "sm_90")
STREAMING = {
    "decode.cuda.triton_linear": ("gate and up", "14336 to 4096", "head of"),
    "decode.cuda.triton_steps": ("w4, 4096 to 6144", "w4k, 4096 to 6144", "w3k, 4096 to 6144"),
    "linear.triton_int8": ("4096 to 4096, 1 row", "14336 to 4096, 1 row"),
}
"""The examples at batch 1 whose tiles fill their threads, by their file."""


def streaming_products() -> None:
    """In its loop a thread asks for the bytes of LOADS 16-byte loads of w4 at least, before it multiplies."""
    for file, names in STREAMING.items():
        found = [each for each in examples_of(file, HOPPER) if any(name in each.name for name in names)]
        assert len(found) >= len(names), (file, found)
        for example in found:
            assert_streams(example)


def _vector_bytes(code: str) -> int:
    return sum(4 * int(match[1]) for match in re.finditer(r"ld\.global\.v([24])\.b32", code))


def no_decoder_without_a_gpu() -> None:
    """Nor an interpreter."""
    with pytest.raises(UnsupportedError, match="needs an NVIDIA GPU"):
        CudaDecoder(tiny_program(pack_for_cuda, "gpt2", ("bf16",)))


def assert_streams(example: Example) -> None:
    """Numbers of 3, 4 and 8 bits that meet int8 activations are multiplied with dp4a.

    Uneven values come from a table by permuting bytes: w4k takes three permutations for four weights, w3k one.
    """
    loop = max(loops(compiled(example.call, HOPPER).ptx), key=len)
    kind = example.call.constants.get("KIND")
    multiplication = "dp4a.s32.s32" if kind in ("w3k", "w4", "w4k", "w8") else r"fma.rn.f32"
    loaded = _vector_bytes(loop[: loop.index(multiplication)])
    assert loaded >= LOADS * 16 * (3 if kind == "w3k" else 4) // 4, (example.name, loaded)
    permutations = {"w3k": 1, "w4k": 3}.get(str(kind), 0)
    assert loop.count("prmt.b32") == permutations * loop.count("dp4a.s32.s32"), example.name
