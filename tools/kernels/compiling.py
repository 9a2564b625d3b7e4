"""A launch compiled for a GPU that is not here: Triton's own way from a kernel to machine code, and what ptxas says."""

import hashlib
import io
import re
from contextlib import redirect_stdout
from dataclasses import dataclass

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from optigpu.hardware.catalog import Capability
from optigpu.ops.launch import KernelCall

WARP = 32
ALIGNMENT = 16
"""Bytes to which torch aligns tensors, and the divisor that Triton compiles an integer argument for."""
_POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int8: "*i8",
}
_REGISTERS = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes spill stores")
_LABEL = re.compile(r"^(\$L__BB\w+):", re.MULTILINE)
_LOAD = re.compile(r"\bld\.global((?:[.:]+\w+)+)")
_COPY = re.compile(
    r"\bcp\.async\.c[ag]\.shared\.global\s*\[[^\]]*\]\s*,\s*\[[^\]]*\]\s*,\s*(0x[0-9a-fA-F]+|\d+)"
)


@dataclass(frozen=True)
class Compiled:
    """What a kernel takes of a multiprocessor. Registers, `spilled_bytes` and `loaded_bytes` are a thread's.

    `loaded_bytes`: what it has asked for before it waits for any of it.
    """

    registers: int
    spilled_bytes: int
    shared_bytes: int
    threads: int
    loaded_bytes: int
    ptx: str


def compiled(call: KernelCall, capability: Capability) -> Compiled:
    """The kernel of a launch, compiled for what the launch passes, down to machine code."""
    major, minor = capability.parts
    log = io.StringIO()
    with knobs.compilation.scope(), knobs.nvidia.scope(), redirect_stdout(log):
        knobs.compilation.always_compile = True  # a kernel from the cache has no log
        knobs.nvidia.dump_ptxas_log = True
        done = compile(
            _source(call),
            target=GPUTarget("cuda", 10 * major + minor, WARP),
            options=call.options,
        )
    ptx = str(done.asm["ptx"])
    return Compiled(
        registers=_figure(_REGISTERS, log.getvalue()),
        spilled_bytes=_figure(_SPILLS, log.getvalue()),
        shared_bytes=int(done.metadata.shared),
        threads=WARP * int(done.metadata.num_warps),
        loaded_bytes=loaded_bytes(ptx, int(done.metadata.num_stages)),
        ptx=ptx,
    )


def digest_of(call: KernelCall, capability: Capability) -> str:
    """SHA-256 of all that the machine code depends on: the kernel with what it calls, the launch, the GPU, Triton."""
    parts = (_source(call).hash(), str(call.warps), capability.name, triton.__version__)
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()


def loaded_bytes(ptx: str, stages: int) -> int:
    """Bytes of global memory that a thread asks for at once: in a turn of that of its innermost loops which asks for
    most, or in all without a loop.

    Asynchronous copies are that of as many turns as there are stages but one.
    """
    found = loops(ptx)
    inner = [loop for loop in found if not any(other in loop for other in found if other != loop)]
    return max(_loaded(code, stages) for code in inner or [ptx])


def _loaded(code: str, stages: int) -> int:
    loads = sum(_bytes_of(match[1]) for match in _LOAD.finditer(code))
    copies = sum(int(match[1], 0) for match in _COPY.finditer(code))
    return loads + (stages - 1) * copies


def loops(ptx: str) -> list[str]:
    """The code between a label and a jump back to it."""
    found = []
    for label in _LABEL.finditer(ptx):
        jump = re.compile(rf"bra\S*\s+{re.escape(label[1])};").search(ptx, label.end())
        if jump:
            found.append(ptx[label.end() : jump.start()])
    return found


def _bytes_of(suffix: str) -> int:
    """Of a load by the parts of its name: 16 of ".L1::evict_last.v4.b32"."""
    parts = suffix.split(".")
    count = next((int(part[1:]) for part in parts if re.fullmatch(r"v\d", part)), 1)
    return count * int(re.sub(r"\D", "", parts[-1])) // 8


def _source(call: KernelCall) -> ASTSource:
    """As a launch specializes it: an integer 1 is compiled in, and what is divisible by ALIGNMENT is known to be."""
    names = [parameter.name for parameter in call.kernel.params]
    absent = {each.name: each.default for each in call.kernel.params if each.has_default}
    given = dict(zip(names, call.arguments, strict=False))
    ones = {name: 1 for name, value in given.items() if isinstance(value, int) and value == 1}
    constants = absent | ones | dict(call.constants)
    signature = {name: "constexpr" if name in constants else _type_of(given[name]) for name in names}
    aligned = {
        (index,): [["tt.divisibility", ALIGNMENT]]
        for index, name in enumerate(names)
        if name not in constants and _is_aligned(given[name])
    }
    return ASTSource(fn=call.kernel, signature=signature, constexprs=constants, attrs=aligned)


def _type_of(value: torch.Tensor | int | float) -> str:
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype]
    return "i32" if isinstance(value, int) else "fp32"


def _is_aligned(value: torch.Tensor | int | float) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, int) and value % ALIGNMENT == 0)


def _figure(pattern: re.Pattern[str], log: str) -> int:
    """The one figure of this kind in what ptxas wrote."""
    (figure,) = pattern.findall(log)
    return int(figure)
