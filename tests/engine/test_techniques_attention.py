"""fused_attention runs the one kernel that it is asked for, or says why not."""

import dataclasses
import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from optigpu.backends.torch.attention import attention_kernels, only_kernel, require_kernel
from optigpu.backends.torch.passes import PassModel
from optigpu.documents.result import Accelerator, Environment
from optigpu.hardware import probe
from optigpu.job.spec import resolve
from optigpu.techniques.base import AttentionKernel, Notes
from optigpu.techniques.compilation.torch_compile import TorchCompile
from optigpu.techniques.kernels.fused_attention import FusedAttention
from optigpu.techniques.memory.no_kv_cache import NoKvCache
from optigpu.techniques.memory.static_kv_cache import StaticKvCache
from optigpu.vocabulary import DeviceKind, Task, UnsupportedError
from tests.breadth import spread
from tests.engine.rounding import in_float64, rounding_bound
from tests.engine.tiny_models import FAMILIES, assert_needs_hook, ignore, prompt, runtime_of

pytestmark = pytest.mark.usefixtures("models_dir", "one_torch_thread")
NEW_TOKENS = 6
NO_MODEL: Any = None
FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"
MATH = "aten::_scaled_dot_product_attention_math"


def observed(model: str, *stack: Any) -> list[str]:
    """The attention operators that ran."""
    runtime = runtime_of(model, *stack)
    runtime.observe(prompt())
    names: list[str] = runtime.notes.facts["attention_kernels"]
    return names


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_attention_runs_the_kernel_that_it_is_asked_for(family: str) -> None:
    def claim() -> None:
        names = observed(f"path:{family}", FusedAttention(kernel="math"))
        assert MATH in names
        assert FLASH not in names

    assert_needs_hook(FusedAttention(kernel="math"), "execution", claim)
    assert observed(f"path:{family}", FusedAttention(kernel="flash")) == [FLASH]


@pytest.mark.parametrize(
    ("family", "others"),
    spread(FAMILIES, [([],), ([StaticKvCache()],), ([NoKvCache()],)], by_default=4),
)
def test_outputs_stay_what_they_were(family: str, others: list[Any]) -> None:
    import torch

    plain = runtime_of(f"path:{family}", *others)
    runtime = runtime_of(f"path:{family}", FusedAttention(kernel="math"), *others)
    tokens = runtime.generate(prompt(), NEW_TOKENS).tokens
    assert tokens.equal(plain.generate(prompt(), NEW_TOKENS).tokens)
    sequence = torch.cat([prompt(), tokens[:, :-1]], dim=1)
    bound = rounding_bound(in_float64(plain.model), sequence, "float32")
    assert float((runtime.logits(sequence) - plain.logits(sequence)).abs().max()) <= 2 * bound


def test_a_forward_pass_that_decodes_nothing_runs_it_as_well() -> None:
    stack = resolve((FusedAttention(kernel="math"),), "generate")
    runtime = PassModel(Task.PREFILL, "path:gpt2", stack, DeviceKind.CPU, seed=0, progress=ignore)
    runtime.observe(prompt())
    assert MATH in runtime.notes.facts["attention_kernels"]


def test_a_request_leaves_the_choice_of_kernels_as_it_was() -> None:
    before = allowed()
    runtime_of("path:gpt2", FusedAttention(kernel="math")).generate(prompt(), NEW_TOKENS)
    assert allowed() == before
    with pytest.raises(UnsupportedError):
        runtime_of("path:gpt2", FusedAttention(kernel="memory_efficient")).generate(prompt(), NEW_TOKENS)
    assert allowed() == before


@pytest.mark.slow
def test_code_that_was_compiled_for_one_kernel_is_not_taken_for_another() -> None:
    """torch's own cache would: its key does not hold which kernels were allowed."""
    import torch

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


def test_another_error_stays_what_it_is() -> None:
    with pytest.raises(RuntimeError, match="something else"), only_kernel("math"):
        raise RuntimeError("something else")


def test_a_kernel_that_did_not_run_is_noticed() -> None:
    runtime = runtime_of("path:llama", FusedAttention(kernel="flash"))
    runtime.model.config._attn_implementation = "eager"
    with pytest.raises(UnsupportedError, match="asked for the flash kernel, but none ran"):
        runtime.observe(prompt())


@pytest.mark.parametrize(
    ("asked", "names", "ran"),
    [
        ("flash", [MATH, "aten::_softmax"], "math"),
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
    ("asked", "names"),
    [
        ("auto", [FLASH, MATH]),
        ("flash", [FLASH]),
        ("flash", ["aten::_flash_attention_forward", "aten::_scaled_dot_product_flash_attention"]),
        ("math", [MATH, "aten::_safe_softmax"]),
        ("memory_efficient", ["aten::_scaled_dot_product_efficient_attention"]),
        ("flash_3", ["aten::_scaled_dot_product_flash_attention", "flash_attn_3::fwd"]),
    ],
)
def test_what_was_asked_for_is_no_reason(asked: AttentionKernel, names: list[str]) -> None:
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


@pytest.mark.parametrize(
    ("kernel", "device", "capability", "head_size"),
    [
        ("auto", "cpu", None, 320),
        ("flash", "cpu", None, 320),
        ("math", "cpu", None, 64),
        ("auto", "cuda", "7.5", 320),
        ("math", "cuda", "7.5", 320),
        ("memory_efficient", "cuda", "7.5", 320),
        ("flash", "cuda", "8.0", 256),
        ("flash_3", "cuda", "9.0", 128),
        ("flash_3", "cuda", None, 128),
    ],
)
def test_a_kernel_that_the_machine_has_is_not_refused(
    kernel: AttentionKernel, device: str, capability: str | None, head_size: int
) -> None:
    assert reason_for(kernel, device, capability, head_size) is None


def test_flash_3_without_its_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    with pytest.raises(UnsupportedError, match=r"install flash-attn-3 from download\.pytorch\.org"):
        FusedAttention(kernel="flash_3").modules(NO_MODEL, Notes())


def test_flash_3_in_a_torch_that_does_not_offer_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch.nn.attention.activate_flash_attention_impl")
    with pytest.raises(UnsupportedError, match="This torch does not offer FlashAttention-3"):
        FusedAttention(kernel="flash_3").modules(NO_MODEL, Notes())


def test_flash_3_is_put_in_the_place_of_torchs_own_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[str] = []
    activate: Callable[[str], None] = chosen.append
    monkeypatch.setattr("torch.nn.attention.activate_flash_attention_impl", activate)
    others: tuple[AttentionKernel, ...] = ("auto", "flash", "math")
    for kernel in others:
        FusedAttention(kernel=kernel).modules(NO_MODEL, Notes())
    notes = Notes()
    FusedAttention(kernel="flash_3").modules(NO_MODEL, notes)
    assert chosen == ["FA3"]
    assert notes.facts == {"flash_attention": "FA3"}


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
    from torch.backends import cuda

    return [
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
    ]
