"""smaller_model loads another model in the place of the job's, and everything else of the stack is applied to it."""

from pathlib import Path

import pytest

from optigpu.hardware import probe
from optigpu.techniques.quantization.bf16 import Bf16
from optigpu.techniques.sparsity.smaller_model import SmallerModel
from optigpu.vocabulary import DeviceKind
from tests.engine.tiny_models import VOCABULARY, asked, assert_needs_hook, prompt, runtime_of

pytestmark = pytest.mark.usefixtures("models_dir", "one_torch_thread")
OTHER = SmallerModel(model="path:llama")


def test_the_other_model_is_measured() -> None:
    plain, alone = runtime_of("path:gpt2"), runtime_of("path:llama")

    def claim() -> None:
        smaller = runtime_of("path:gpt2", OTHER)
        assert smaller.logits(prompt()).equal(alone.logits(prompt()))
        assert not smaller.logits(prompt()).equal(plain.logits(prompt()))
        assert smaller.facts == alone.facts

    assert_needs_hook(OTHER, "load", claim)


def test_the_weights_hash_is_the_job_s_model_s_and_the_other_s_is_noted(models_dir: Path) -> None:
    """So that the result stands on the board of the model that the job names."""
    smaller = runtime_of("path:gpt2", OTHER)
    assert (
        asked(smaller, models_dir).weights().hash == asked(runtime_of("path:gpt2"), models_dir).weights().hash
    )
    llama = asked(runtime_of("path:llama"), models_dir).weights().hash
    assert smaller.notes.facts["loaded_instead"] == {"model": "path:llama", "hash": llama}


def test_the_rest_of_the_stack_is_applied_to_it() -> None:
    both = runtime_of("path:gpt2", OTHER, Bf16())
    assert {str(weight.dtype) for weight in both.model.parameters()} == {"torch.bfloat16"}
    assert both.model.config.model_type == "llama"


def test_without_a_model_or_with_another_vocabulary_it_says_what_to_write() -> None:
    here = probe()
    assert "smaller_model:model=path:DIR" in str(SmallerModel().check(here, DeviceKind.CPU, None))
    assert OTHER.check(here, DeviceKind.CPU, None) is None
    why = SmallerModel(model="preset:gpt2").check(here, DeviceKind.CPU, runtime_of("path:gpt2").facts)
    assert f"50257 tokens and the model {VOCABULARY}" in str(why)


def test_a_reference_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="Unknown preset"):
        SmallerModel(model="preset:nothing")
