"""The Triton kernels of bias_gelu and swiglu, as far as they go without a GPU: interpreted, and compiled for one."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.test_ops_fused_activation import (
    FORMS,
    UNIT,
    assert_within,
    exact_gelu,
    exact_swiglu,
    summed,
)


@pytest.fixture
def in_another_process(tmp_path: Path) -> Callable[[str, dict[str, str]], Any]:
    """Runs code with environment variables, and gives what it saves with torch.save at its first argument."""

    def run(code: str, variables: dict[str, str]) -> Any:
        target = tmp_path / "saved.pt"
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])} | variables
        done = subprocess.run(
            [sys.executable, "-c", code, str(target)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return torch.load(target)

    return run


def test_the_triton_kernels_compute_the_same(
    in_another_process: Callable[[str, dict[str, str]], Any],
) -> None:
    """Through Triton's interpreter, which needs no GPU; it cuts bfloat16 off instead of rounding it."""
    code = (
        "import sys, torch\n"
        "from optigpu.ops.activation.triton_activation import triton_bias_gelu, triton_swiglu\n"
        "from tests.engine.test_ops_fused_activation import normal\n"
        "results = []\n"
        "for shape in [(1, 1), (3, 17), (2, 2, 1030)]:\n"
        "    for dtype in (torch.float32, torch.bfloat16, torch.float16):\n"
        "        x, pairs = normal(*shape, dtype=dtype), normal(*shape[:-1], 2 * shape[-1], dtype=dtype)\n"
        "        for given in (True, False):\n"
        "            bias, two = (normal(r.shape[-1], dtype=dtype, seed=1) if given else None for r in (x, pairs))\n"
        "            gelus = [triton_bias_gelu(x, bias, tanh) for tanh in (False, True)]\n"
        "            results.append((x, bias, pairs, two, gelus, triton_swiglu(pairs, two)))\n"
        "empty = [triton_bias_gelu(normal(0, 4), None, True).shape, triton_swiglu(normal(0, 4), None).shape]\n"
        "torch.save((results, empty), sys.argv[1])\n"
    )
    results, empty = in_another_process(code, {"TRITON_INTERPRET": "1"})
    assert empty == [(0, 4), (0, 2)]
    for x, bias, pairs, two, gelus, gated in results:
        cut = torch.finfo(x.dtype).eps if x.dtype == torch.bfloat16 else 0.0
        for form, y in zip(FORMS, gelus, strict=True):
            v = summed(x, bias)
            exact, _ = exact_gelu(v, form)
            assert y.dtype == x.dtype
            # erf's tail is what is left of a difference from one.
            assert_within(y, (exact, 4 * UNIT * v.double().abs() + cut * exact.abs()))
        exact, arithmetic = exact_swiglu(summed(pairs, two))
        assert_within(gated, (exact, arithmetic + cut * exact.abs()))


def test_the_triton_kernels_compile_for_a_gpu(
    in_another_process: Callable[[str, dict[str, str]], Any], tmp_path: Path
) -> None:
    """Down to machine code for a Hopper GPU; Triton brings the assembler."""
    code = (
        "import sys, torch\n"
        "from triton.backends.compiler import GPUTarget\n"
        "from triton.compiler import ASTSource, compile\n"
        "from optigpu.ops import triton_activation as ours\n"
        "sizes = []\n"
        "for kernel in (ours._bias_gelu_kernel, ours._swiglu_kernel):\n"
        "    for element, flag in (('fp32', True), ('bf16', False), ('fp16', True)):\n"
        "        chosen = {'HAS_BIAS': flag, 'ACTIVATION': 'gelu_tanh' if flag else 'gelu', 'BLOCK': ours.BLOCK}\n"
        "        constants = {p.name: chosen[p.name] for p in kernel.params if p.is_constexpr}\n"
        "        types = {name: '*' + element for name in ('x', 'bias', 'y')}\n"
        "        signature = {p.name: types.get(p.name, 'i32') for p in kernel.params}\n"
        "        signature |= dict.fromkeys(constants, 'constexpr')\n"
        "        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)\n"
        "        sizes.append(len(compile(source, target=GPUTarget('cuda', 90, 32)).asm['cubin']))\n"
        "torch.save(sizes, sys.argv[1])\n"
    )
    sizes = in_another_process(code, {"TRITON_CACHE_DIR": str(tmp_path)})
    assert len(sizes) == 6
    assert min(sizes) > 0
