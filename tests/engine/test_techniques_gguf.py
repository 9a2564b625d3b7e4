"""gguf and llama.cpp's own settings choose the file that is read and the context that it is decoded in."""

from typing import get_args

import pytest

from optigpu.backends import BACKENDS
from optigpu.backends.ik_llama_cpp.native import FILE_TYPES as IK_FILE_TYPES
from optigpu.backends.llama_cpp.file_types import NEED_IMPORTANCE, ExactCaches, Form, asked_of, form_of
from optigpu.documents.shapes import ModelFacts
from optigpu.hardware import probe
from optigpu.job.spec import JobSpec
from optigpu.models.described import decoder_shape
from optigpu.models.facts import facts_of
from optigpu.models.reference import parse_reference
from optigpu.techniques.base import GgufType, Technique
from optigpu.techniques.kernels.llama_flash_attention import LlamaFlashAttention
from optigpu.techniques.memory.llama_kv_cache import LlamaKvCache
from optigpu.techniques.memory.llama_prompt_batch import LlamaPromptBatch
from optigpu.techniques.quantization.gguf import Gguf
from optigpu.vocabulary import DeviceKind, UnsupportedError
from optigpu.workloads.generate import Generate
from tests.breadth import spread
from tests.engine.tiny_models import assert_needs_hook

FLASH = (LlamaFlashAttention(), LlamaFlashAttention(enabled=False))


@pytest.mark.parametrize("kind", spread(get_args(GgufType)))
def test_the_file_has_the_type_that_is_asked_for(kind: GgufType) -> None:
    technique = Gguf(type=kind, pure=True)

    def claim() -> None:
        assert form_of((technique,)) == Form(kind, everywhere=True)

    assert_needs_hook(technique, "engine", claim)


def test_without_it_weights_are_float32_and_so_are_the_cache_and_the_attention() -> None:
    assert form_of(()) == Form("F32")
    asked = asked_of((), "F32", 2, ExactCaches())
    assert (asked.keys, asked.values, asked.attention, asked.together) == ("F32", "F32", "plain", None)
    free = asked_of((Gguf(),), "Q4_0", 2, ExactCaches())
    assert (free.keys, free.values, free.attention) == (None, None, None)


@pytest.mark.parametrize("technique", FLASH, ids=str)
def test_attention_is_what_is_asked_for(technique: LlamaFlashAttention) -> None:
    other = {"fused": "plain", "plain": "fused"}

    def claim() -> None:
        wanted = "fused" if technique.enabled else "plain"
        assert asked_of((technique,), "Q8_0", 1, ExactCaches()).attention == wanted != other[wanted]

    assert_needs_hook(technique, "engine", claim)


def test_keys_and_values_are_kept_in_what_is_asked_for() -> None:
    technique = LlamaKvCache(keys="F16", values="Q4_0")

    def claim() -> None:
        asked = asked_of((technique,), "F32", 1, ExactCaches())
        assert (asked.keys, asked.values, asked.attention) == ("F16", "Q4_0", "fused")

    assert_needs_hook(technique, "engine", claim)


def test_values_of_few_bits_need_flash_attention() -> None:
    with pytest.raises(UnsupportedError, match="Only flash attention reads values"):
        asked_of((LlamaKvCache(), FLASH[1]), "Q4_0", 1, ExactCaches())
    assert (
        asked_of((LlamaKvCache(keys="Q8_0", values="F16"), FLASH[1]), "Q4_0", 1, ExactCaches()).attention
        == "plain"
    )


def test_heads_that_are_no_whole_blocks_are_refused() -> None:
    facts = facts_of(parse_reference("preset:tiny-llama-test"))
    assert facts is not None
    odd = ModelFacts(**{**vars(facts), "head_size": 24})
    for model, reason in ((facts, None), (odd, "blocks of 32 numbers, and this model's have 24")):
        found = LlamaKvCache().check(probe(), DeviceKind.CPU, model)
        assert found is None if reason is None else reason in str(found)
    assert LlamaKvCache(keys="F16", values="F16").check(probe(), DeviceKind.CPU, odd) is None


def test_a_prompt_goes_through_in_passes_of_what_is_asked_for() -> None:
    technique = LlamaPromptBatch(tokens=16)

    def claim() -> None:
        assert asked_of((technique,), "Q4_0", 1, ExactCaches()).together == 16

    assert_needs_hook(technique, "engine", claim)


def test_parameters_that_came_later_leave_earlier_digests_as_they_were() -> None:
    assert Gguf().identity() == {"name": "gguf", "type": "Q4_0", "version": 1}
    assert Gguf(pure=True).identity()["pure"] is True


@pytest.mark.parametrize(
    ("backend", "kind", "words"),
    [
        ("llama_cpp", "IQ4_KS", "llama.cpp has no type IQ4_KS; ask for the backend ik_llama_cpp"),
        ("ik_llama_cpp", "TQ1_0", "ik_llama.cpp has no type TQ1_0; ask for the backend llama_cpp"),
        ("ik_llama_cpp", "IQ2_XXS", "needs to know how much each input matters"),
    ],
)
def test_a_type_that_an_engine_has_not_is_refused_when_a_job_is_posted(
    backend: str, kind: GgufType, words: str
) -> None:
    stack = [{"name": "gguf", "type": kind}]
    model = "preset:tiny-llama-test"
    with pytest.raises(ValueError, match=words):
        JobSpec.model_validate(
            {"workload": {"kind": "generate"}, "model": model, "backend": backend, "stack": stack}
        )


def test_each_type_has_an_engine_and_the_fork_knows_the_numbers_of_its_own() -> None:
    engines = BACKENDS["llama_cpp"], BACKENDS["ik_llama_cpp"]
    for kind in get_args(GgufType):
        takes = [engine.supports(Generate(), Gguf(type=kind)) is None for engine in engines]
        assert any(takes), kind
        assert takes[1] == (kind in IK_FILE_TYPES), kind
        assert not (kind in NEED_IMPORTANCE and takes[1])


@pytest.mark.parametrize("technique", [LlamaKvCache(), LlamaPromptBatch(), *FLASH], ids=str)
def test_they_are_for_both_engines_and_for_no_other(technique: Technique) -> None:
    assert technique.backends == ("llama_cpp", "ik_llama_cpp")


def test_bytes_of_a_file_follow_from_shapes_where_its_mixture_is_known() -> None:
    plain = decoder_shape(parse_reference("preset:llama-3.2-1b")).stored(4)
    mixed, pure = (Gguf(pure=pure).stored(plain, DeviceKind.CPU).bytes for pure in (False, True))
    assert pure < mixed < 0.16 * plain.bytes
    assert pure == pytest.approx(plain.bytes * 18 / 128, rel=0.01), "32 numbers in 18 bytes, everywhere"
    with pytest.raises(UnsupportedError, match="Which matrices get more bits in a file of Q5_K_M"):
        Gguf(type="Q5_K_M").stored(plain, DeviceKind.CPU)
    with pytest.raises(UnsupportedError, match="How many bytes IQ4_KT takes"):
        Gguf(type="IQ4_KT", pure=True).stored(plain, DeviceKind.CPU)
