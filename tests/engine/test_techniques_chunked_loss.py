"""chunked_cross_entropy computes the plain loss and gradient, and never the logits of more tokens than a chunk has."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from optigpu.backends.torch.training.model import loss_of
from optigpu.backends.torch.training.runtime import TorchTrainingRuntime
from optigpu.backends.training import NO_TARGET, MicroBatch
from optigpu.models.families import FAMILIES
from optigpu.techniques.training.chunked_cross_entropy import ChunkedCrossEntropy
from optigpu.techniques.training.chunked_cross_entropy.loss import ChunkedLoss
from optigpu.techniques.training.lora import Lora
from optigpu.techniques.training.mixed_precision import MixedPrecision
from optigpu.vocabulary import UnsupportedError
from tests.engine.tiny_models import FAMILIES as SIZES
from tests.engine.tiny_models import assert_needs_hook
from tests.engine.training import LLAMA, VIT, losses_of, peak_bytes, texts_for, trained

pytestmark = pytest.mark.usefixtures("one_torch_thread")
LANGUAGE_FAMILIES = [name for name, family in FAMILIES.items() if family.decoder]
CHUNK = 8
VOCABULARY = 512
"""Of the tiny Llama."""


def model_of(family: str, **more: Any) -> Any:
    sizes = SIZES.get(family, SIZES["llama"])
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{"vocab_size": 96, **special, **sizes, **more})
    return AutoModelForCausalLM.from_config(config).eval()


def rows() -> MicroBatch:
    """Two rows of 13 tokens, which chunks do not divide, with places where nothing is predicted."""
    ids = torch.randint(96, (2, 13), generator=torch.Generator().manual_seed(0))
    labels = ids.roll(-1, dims=1)
    labels[:, -1], labels[1, 5:] = NO_TARGET, NO_TARGET
    return MicroBatch({"input_ids": ids}, labels, int((labels != NO_TARGET).sum()))


def gradients(model: Any) -> list[torch.Tensor]:
    found = [weight.grad for weight in model.parameters()]
    model.zero_grad()
    return found


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", LANGUAGE_FAMILIES)
def test_loss_and_gradients_are_those_of_the_plain_loss(family: str, tied: bool) -> None:
    model = model_of(family, tie_word_embeddings=tied)
    plain = loss_of(model)(rows())
    plain.backward()
    expected = gradients(model)
    chunked = ChunkedLoss(model, CHUNK)(rows())
    chunked.backward()
    assert chunked.item() == pytest.approx(plain.item(), rel=1e-6)
    largest = max(float(gradient.abs().max()) for gradient in expected)
    for found, wanted in zip(gradients(model), expected, strict=True):
        assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-6 * largest)


class Logits(TorchDispatchMode):
    """Of how many tokens operators made logits at once."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary, self.tokens = vocabulary, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.dim() and made.shape[-1] == self.vocabulary:
            self.tokens.add(made.numel() // self.vocabulary)
        return made


def test_no_operator_makes_logits_of_more_tokens_than_a_chunk_has() -> None:
    def claim() -> None:
        runtime = trained(LLAMA, ChunkedCrossEntropy(tokens=CHUNK))
        with Logits(VOCABULARY) as made:
            norm = runtime.gradient_norm(texts_for(runtime))
        assert CHUNK in made.tokens
        assert 4 * 16 not in made.tokens
        assert norm == pytest.approx(trained(LLAMA).gradient_norm(texts_for(runtime)), rel=1e-5)

    assert_needs_hook(ChunkedCrossEntropy(), "training", claim)


def test_a_step_takes_less_memory_by_most_of_its_logits() -> None:
    """Logits in float32, and as much for their softmax and their gradient."""
    plain, chunked = peak(trained(LLAMA)), peak(trained(LLAMA, ChunkedCrossEntropy(tokens=64)))
    assert plain - chunked > 0.8 * 4 * 8 * 128 * VOCABULARY


def peak(runtime: TorchTrainingRuntime) -> int:
    return peak_bytes(runtime, texts_for(runtime, documents=8, length=128, shortest=128))


def test_it_goes_with_factors_and_autocast() -> None:
    stack = (Lora(), MixedPrecision())
    plain = losses_of(trained(LLAMA, *stack))
    assert losses_of(trained(LLAMA, *stack, ChunkedCrossEntropy(tokens=CHUNK))) == pytest.approx(
        plain, rel=1e-3
    )


def test_one_product_with_the_head_more_is_counted_as_recomputation() -> None:
    plain, chunked = (
        runtime.step_flops(texts_for(runtime))
        for runtime in (trained(LLAMA), trained(LLAMA, ChunkedCrossEntropy(tokens=CHUNK)))
    )
    head = 2 * 4 * 16 * 128 * 512
    assert chunked.model == plain.model
    assert chunked.hardware - plain.hardware == head


@pytest.mark.parametrize(
    ("family", "more"), [("granite", {"logits_scaling": 4.0}), ("gemma2", {"head_dim": 16})]
)
def test_a_model_that_changes_its_head_s_product_is_refused(family: str, more: dict[str, float]) -> None:
    model = model_of(family, **more)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(5)
    with pytest.raises(UnsupportedError, match="changes its head's product"):
        ChunkedLoss(model, CHUNK)


def test_an_image_classifier_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="needs a language model with a head"):
        trained(VIT, ChunkedCrossEntropy())
