"""Attention techniques run the kernel that they are asked for, or say why not, and change nothing that comes out."""

import dataclasses
import re
from functools import partial
from typing import Any

import pytest
import torch
from torch.backends import cuda

from optigpu.backends.torch.attention import attention_kernels, only_kernel, require_kernel
from optigpu.documents.result import Accelerator, Environment
from optigpu.hardware import probe
from optigpu.techniques.base import AttentionKernel, Technique
from optigpu.techniques.compilation.torch_compile import TorchCompile
from optigpu.techniques.kernels.eager_attention import EagerAttention
from optigpu.techniques.kernels.fused_attention import FusedAttention
from optigpu.techniques.memory.no_kv_cache import NoKvCache
from optigpu.techniques.memory.static_kv_cache import StaticKvCache
from optigpu.vocabulary import DeviceKind, UnsupportedError
from tests.breadth import cases, spread
from tests.engine.decoded import NEW_TOKENS, assert_right
from tests.engine.rounding import in_float64
from tests.engine.tiny_models import FAMILIES, assert_needs_hook, prompt, runtime_of

pytestmark = pytest.mark.usefixtures("models_dir", "one_torch_thread")
FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"
MATH = "aten::_scaled_dot_product_attention_math"
TECHNIQUES = [EagerAttention(), FusedAttention(kernel="math"), NoKvCache(), StaticKvCache()]


def observed(model: str, *stack: Technique) -> dict[str, Any]:
    """The facts of a request whose operators were looked at."""
    runtime = runtime_of(model, *stack)
    runtime.observe(prompt())
    return runtime.notes.facts


@pytest.mark.slow
@pytest.mark.parametrize("family", cases(FAMILIES))
def test_fused_attention_runs_the_kernel_that_it_is_asked_for(family: str) -> None:
    def claim() -> None:
        names = observed(f"path:{family}", FusedAttention(kernel="math"))["attention_kernels"]
        assert MATH in names
        assert FLASH not in names

    assert_needs_hook(FusedAttention(kernel="math"), "execution", claim)
    flash = observed(f"path:{family}", FusedAttention(kernel="flash"))
    assert flash["attention_kernels"] == [FLASH]


def test_a_request_leaves_the_choice_of_kernels_as_it_was() -> None:
    before = allowed()
    runtime_of("path:gpt2", FusedAttention(kernel="math")).generate(prompt(), NEW_TOKENS)
    assert allowed() == before
    with pytest.raises(UnsupportedError):
        runtime_of("path:gpt2", FusedAttention(kernel="memory_efficient")).generate(prompt(), NEW_TOKENS)
    assert allowed() == before


@pytest.mark.long
@pytest.mark.slow
def test_code_that_was_compiled_for_one_kernel_is_not_taken_for_another() -> None:
    """torch's own cache would: its key does not hold which kernels were allowed."""

    def attend(x: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    x = torch.randn(2, 4, 8, 16)
    kernels: tuple[AttentionKernel, ...] = ("flash", "math", "flash")
    ran = []
    for kernel in kernels:
        torch.compiler.reset()
        with torch.no_grad(), only_kernel(kernel):
            compiled = torch.compile(attend, fullgraph=True)
            compiled(x)
            ran.append(attention_kernels(partial(compiled, x), DeviceKind.CPU))
    assert ran == [[FLASH], [], [FLASH]]


@pytest.mark.long
def test_a_compiled_step_runs_the_kernel_that_was_asked_for() -> None:
    runtime = runtime_of("path:gpt2", FusedAttention(kernel="math"), TorchCompile())
    runtime.observe(prompt())
    assert FLASH not in runtime.notes.facts["attention_kernels"]
    assert MATH in runtime.notes.facts["attention_kernels"]  # the prompt's


def test_a_kernel_that_torch_cannot_run_is_a_reason_and_no_failure() -> None:
    runtime = runtime_of("path:gpt2", FusedAttention(kernel="memory_efficient"))
    with pytest.raises(UnsupportedError, match="cannot run its memory_efficient attention kernel"):
        runtime.generate(prompt(), NEW_TOKENS)


def test_a_kernel_that_did_not_run_is_noticed() -> None:
    runtime = runtime_of("path:llama", FusedAttention(kernel="flash"))
    runtime.model.config._attn_implementation = "eager"
    with pytest.raises(UnsupportedError, match="asked for the flash kernel, but none ran"):
        runtime.observe(prompt())


@pytest.mark.parametrize(
    ("asked", "names", "ran"),
    [
        ("flash", [FLASH, MATH], "flash and math"),
        ("math", ["aten::_scaled_dot_product_efficient_attention"], "memory_efficient"),
        ("memory_efficient", ["aten::_scaled_dot_product_cudnn_attention"], "cudnn"),
        ("flash_3", ["aten::_scaled_dot_product_flash_attention", "flash_fwd_kernel"], "flash"),
        ("flash", ["aten::_scaled_dot_product_flash_attention", "flash_attn_3::fwd"], "flash_3"),
        ("math", [], "none"),
    ],
)
def test_what_ran_instead_is_named(asked: AttentionKernel, names: list[str], ran: str) -> None:
    with pytest.raises(UnsupportedError, match=f"asked for the {asked} kernel, but {ran} ran;"):
        require_kernel(asked, names)


@pytest.mark.parametrize(
    ("kernel", "device", "capability", "head_size", "sentence"),
    [
        ("memory_efficient", "cpu", None, 64, "no memory-efficient attention kernel for CPUs"),
        ("flash_3", "cpu", None, 64, "FlashAttention-3 needs a Hopper GPU"),
        ("flash", "cuda", "7.5", 64, "need compute capability 8.0"),
        ("flash_3", "cuda", "8.9", 64, "need compute capability 9.0"),
        ("flash_3", "cuda", "10.0", 64, r"a Hopper GPU \(compute capability 9.0\), and this one has 10.0"),
        ("flash", "cuda", "9.0", 320, "a head size of at most 256; this model has 320"),
        ("flash_3", "cuda", "9.0", 320, "a head size of at most 256"),
    ],
)
def test_a_kernel_that_the_machine_does_not_have_is_refused_before_a_model_is_loaded(
    kernel: AttentionKernel, device: str, capability: str | None, head_size: int, sentence: str
) -> None:
    reason = reason_for(kernel, device, capability, head_size)
    assert reason is not None
    assert re.search(sentence, reason)


def test_earlier_results_stay_comparable() -> None:
    """The digest of a stack that leaves the choice to torch is what it was before there was a choice."""
    assert FusedAttention().identity() == {"name": "fused_attention", "version": 1}
    assert FusedAttention(kernel="math").identity()["kernel"] == "math"


def reason_for(kernel: AttentionKernel, device: str, capability: str | None, head_size: int) -> str | None:
    gpu = Accelerator(name="GPU", memory_bytes=2**34, uuid="GPU-0", compute_capability=capability)
    environment: Environment = probe().model_copy(update={"accelerators": (gpu,)})
    facts = dataclasses.replace(runtime_of("path:gpt2").facts, head_size=head_size)
    return FusedAttention(kernel=kernel).check(environment, DeviceKind(device), facts)


def allowed() -> list[bool]:
    return [
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
    ]


@pytest.mark.parametrize(("family", "technique"), spread(FAMILIES, TECHNIQUES, by_default=4))
def test_outputs_stay_what_they_were(family: str, technique: Technique) -> None:
    runtime = runtime_of(f"path:{family}", technique)
    assert_right(runtime, in_float64(runtime.model))


@pytest.mark.parametrize("family", cases(FAMILIES))
def test_eager_attention_runs_a_softmax_of_its_own(family: str) -> None:
    def claim() -> None:
        facts = observed(f"path:{family}", EagerAttention())
        assert facts["attn_implementation"] == "eager"
        assert facts["attention_kernels"] == ["aten::_softmax"]

    assert_needs_hook(EagerAttention(), "load", claim)
