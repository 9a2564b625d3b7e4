"""The attention and cache techniques change what runs, and not what comes out."""

from typing import Any

import pytest

from optigpu.backends.torch.applied import DecodingModel
from optigpu.techniques.base import Technique
from optigpu.techniques.kernels.eager_attention import EagerAttention
from optigpu.techniques.kernels.fused_attention import FusedAttention
from optigpu.techniques.memory.no_kv_cache import NoKvCache
from optigpu.techniques.memory.static_kv_cache import StaticKvCache
from tests.breadth import spread
from tests.engine.decoded import NEW_TOKENS, assert_right
from tests.engine.rounding import in_float64
from tests.engine.tiny_models import FAMILIES, assert_needs_hook, prompt, runtime_of

pytestmark = pytest.mark.usefixtures("models_dir", "one_torch_thread")


@pytest.mark.parametrize(
    ("family", "technique"),
    spread(FAMILIES, [EagerAttention(), FusedAttention(), NoKvCache(), StaticKvCache()], by_default=4),
)
def test_outputs_stay_what_they_were(family: str, technique: Technique) -> None:
    runtime = runtime_of(f"path:{family}", technique)
    assert_right(runtime, in_float64(runtime.model))


@pytest.mark.parametrize("family", FAMILIES)
def test_eager_attention_runs_a_softmax_of_its_own(family: str) -> None:
    def claim() -> None:
        facts = observed(f"path:{family}", EagerAttention())
        assert facts["attn_implementation"] == "eager"
        assert facts["attention_kernels"] == ["aten::_softmax"]

    assert_needs_hook(EagerAttention(), "load", claim)


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_attention_runs_one_kernel_that_was_asked_for_by_name(family: str) -> None:
    """The library's default is fused already, so what the technique adds by itself is that it is asked for."""
    from optigpu.backends.torch.stack import load_options

    def claim() -> None:
        assert load_options((FusedAttention(),)).attention == "sdpa"
        facts = observed(f"path:{family}", FusedAttention())
        assert facts["attn_implementation"] == "sdpa"
        assert facts["attention_kernels"] == ["aten::_scaled_dot_product_flash_attention_for_cpu"]

    assert_needs_hook(FusedAttention(), "load", claim)


@pytest.mark.parametrize("family", FAMILIES)
def test_static_kv_cache_has_its_full_length_from_the_start(family: str) -> None:
    def claim() -> None:
        calls = forward_calls(runtime_of(f"path:{family}", StaticKvCache()))
        assert [call["cache"] for call in calls] == ["StaticCache"] * NEW_TOKENS
        assert {call["room"] for call in calls} <= {8 + NEW_TOKENS, 8 + NEW_TOKENS - 1}

    assert_needs_hook(StaticKvCache(), "cache", claim)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_kv_cache_runs_the_whole_sequence_for_each_token(family: str) -> None:
    def claim() -> None:
        calls = forward_calls(runtime_of(f"path:{family}", NoKvCache()))
        assert [call["tokens"] for call in calls] == [8 + index for index in range(NEW_TOKENS)]
        assert {call["cache"] for call in calls} == {None}

    assert_needs_hook(NoKvCache(), "cache", claim)


def observed(model: str, *stack: Technique) -> dict[str, Any]:
    runtime = runtime_of(model, *stack)
    runtime.observe(prompt())
    return runtime.notes.facts


def forward_calls(runtime: DecodingModel) -> list[dict[str, Any]]:
    """What the model is given for each token while it generates."""
    calls = []

    def see(module: Any, arguments: Any, named: dict[str, Any]) -> None:
        cache = named.get("past_key_values")
        calls.append(
            {
                "tokens": named["input_ids"].shape[1],
                "cache": type(cache).__name__ if cache is not None else None,
                "room": room_of(cache),
            }
        )

    handle = runtime.model.register_forward_pre_hook(see, with_kwargs=True)
    runtime.generate(prompt(), NEW_TOKENS)
    handle.remove()
    return calls


def room_of(cache: Any) -> int | None:
    """The length of a static cache; None for one that grows and for none at all."""
    return getattr(cache.layers[0], "max_cache_len", None) if cache is not None else None
