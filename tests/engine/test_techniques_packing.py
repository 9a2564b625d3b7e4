"""sequence_packing keeps documents apart within a row: every loss is the one of the document in a row of its own."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from optigpu.backends.training import NO_TARGET, Texts
from optigpu.models.families import FAMILIES
from optigpu.techniques.base import Notes
from optigpu.techniques.training.gradient_accumulation import GradientAccumulation
from optigpu.techniques.training.sequence_packing import SequencePacking
from optigpu.techniques.training.sequence_packing.packing import PackedArrangement, first_fit_decreasing
from optigpu.vocabulary import UnsupportedError
from optigpu.workloads.train_step import TrainStep
from tests.engine.tiny_models import FAMILIES as SIZES
from tests.engine.tiny_models import assert_needs_hook
from tests.engine.training import GPT2, LLAMA, VIT, trained, weights_of

pytestmark = pytest.mark.usefixtures("one_torch_thread")
LENGTHS = (5, 9, 3, 12, 2, 7)
ROW = 16


def texts() -> Texts:
    source = np.random.default_rng(0)
    return Texts(tuple(source.integers(96, size=length) for length in LENGTHS), ROW)


def model_of(family: str, attention: str = "sdpa", **more: Any) -> Any:
    """With larger random weights than usual, so that logits depend on all that is seen."""
    sizes = SIZES.get(family, SIZES["llama"])
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{"vocab_size": 96, **special, **sizes, **more})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(5)
    return model


@given(st.lists(st.integers(1, 20), min_size=1, max_size=30))
def test_first_fit_decreasing_places_each_document_once_and_fills_no_row_over(lengths: list[int]) -> None:
    rows = first_fit_decreasing(lengths, 20)
    assert sorted(document for row in rows for document in row) == list(range(len(lengths)))
    used = [sum(lengths[document] for document in row) for row in rows]
    assert max(used) <= 20
    # At most one row is half empty: the first document of a later one would have fitted into it.
    assert sum(space <= 10 for space in used) <= 1


def test_the_longest_document_comes_first_and_the_next_goes_where_it_fits() -> None:
    assert first_fit_decreasing(LENGTHS, ROW) == [[3, 2], [1, 5], [0, 4]]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.decoder])
def test_the_losses_of_each_document_are_those_of_its_own_row(family: str, attention: str) -> None:
    model, batch = model_of(family, attention), texts()
    (packed,) = PackedArrangement(model, Notes())(batch)
    with torch.no_grad():
        logits = model(**packed.inputs, use_cache=False).logits
        losses = functional.cross_entropy(
            logits.flatten(0, 1), packed.labels.flatten(), ignore_index=NO_TARGET, reduction="none"
        ).view(3, ROW)
        places = {3: (0, 0), 2: (0, 12), 1: (1, 0), 5: (1, 9), 0: (2, 0), 4: (2, 5)}
        for document, (row, begin) in places.items():
            ids = torch.from_numpy(batch.documents[document])
            alone = model(input_ids=ids[None, :-1], use_cache=False).logits[0]
            expected = functional.cross_entropy(alone, ids[1:], reduction="none")
            found = losses[row, begin : begin + len(ids) - 1]
            assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert packed.targets == sum(LENGTHS) - len(LENGTHS) == int((losses != 0).sum())


@pytest.mark.parametrize("model", [LLAMA, GPT2])
def test_a_step_learns_the_same_from_fewer_rows(model: str) -> None:
    plain = trained(model)
    expected, norm = plain.step(texts()), plain.gradient_norm(texts())

    def claim() -> None:
        runtime = trained(model, SequencePacking(), shortest_tokens=2, sequence_tokens=ROW)
        done = runtime.step(texts())
        assert done.computed_tokens == 3 * ROW < expected.computed_tokens
        assert done.loss == pytest.approx(expected.loss, rel=1e-5)
        assert runtime.gradient_norm(texts()) == pytest.approx(norm, rel=1e-4)
        for found, wanted in zip(weights_of(runtime), weights_of(plain), strict=True):
            assert torch.allclose(found, wanted, atol=1e-5)
        assert runtime.notes.facts["packed_rows"] == 3

    assert_needs_hook(SequencePacking(), "training", claim)


def test_each_part_of_a_step_is_packed_where_gradients_are_accumulated() -> None:
    stack = SequencePacking(), GradientAccumulation(micro_batches=2)
    runtime = trained(LLAMA, *stack, shortest_tokens=2, sequence_tokens=ROW)
    done = runtime.step(texts())
    assert done.computed_tokens == 4 * ROW
    assert done.loss == pytest.approx(trained(LLAMA).step(texts()).loss, rel=1e-5)


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("bloom", {"hidden_size": 64, "n_layer": 2, "n_head": 4}),
        ("rwkv", {"hidden_size": 64, "num_hidden_layers": 2}),
    ],
)
def test_a_model_whose_attention_cannot_be_masked_so_is_refused(family: str, sizes: dict[str, int]) -> None:
    with pytest.raises(UnsupportedError, match="cannot keep the attention of this model within a document"):
        PackedArrangement(model_of(family, "eager", **sizes), Notes())


def test_a_model_with_a_window_below_a_row_is_refused() -> None:
    arrange = PackedArrangement(model_of("mistral", sliding_window=12), Notes())
    with pytest.raises(UnsupportedError, match="attends to 12 tokens at most"):
        arrange(texts())


def test_an_image_classifier_and_a_document_longer_than_a_row_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="is for models of text"):
        trained(VIT, SequencePacking())
    arrange = PackedArrangement(model_of("llama"), Notes())
    with pytest.raises(UnsupportedError, match="A document has 12 tokens and a row has 8"):
        arrange(Texts(texts().documents, 8))


@pytest.mark.parametrize(("shortest", "fits"), [(None, False), (ROW, False), (ROW - 1, True)])
def test_documents_that_all_fill_a_row_are_refused_when_a_job_is_posted(
    shortest: int | None, fits: bool
) -> None:
    workload = TrainStep(sequence_tokens=ROW, shortest_tokens=shortest)
    problem = SequencePacking().fits(workload)
    assert (problem is None) is fits
    assert fits or "set shortest_tokens below 16" in str(problem)
