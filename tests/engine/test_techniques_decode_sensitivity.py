"""More bytes go to the layers with the largest divergence, which is predicted before anything is rounded."""

from typing import Any

import pytest
import torch

from optigpu.models.loading.self_written import sampled
from optigpu.ops.decode.program import WeightKind
from optigpu.quality.divergence import divergence
from optigpu.surgery.places import linear_places, weight_of
from optigpu.techniques.decoding.native_decode import NativeDecode
from optigpu.techniques.decoding.native_decode.requirements import HEAD_PATH
from optigpu.techniques.decoding.native_decode.sensitivity import ROWS as SEQUENCES
from optigpu.techniques.decoding.native_decode.sensitivity import divergences, fisher_information
from tests.engine.decoder_models import packed
from tests.engine.tiny_models import FAMILIES, VOCABULARY, runtime_of, tiny_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.mark.slow
def test_more_bytes_go_where_the_divergence_is_largest() -> None:
    plain = runtime_of("bundled:tiny")
    tokens = plain.sample(8, 96)
    expected = plain.model(input_ids=tokens, use_cache=False).logits[:, 8:].numpy()

    def loss(technique: NativeDecode) -> tuple[float, dict[str, Any]]:
        runtime = runtime_of("bundled:tiny", technique)
        found = torch.stack(list(runtime.score(tokens, 8)), dim=1).numpy()
        return float(divergence(expected, found).mean()), runtime.notes.facts

    least, base = loss(NativeDecode(calibration="none"))
    most, _ = loss(NativeDecode(calibration="none", weights="w8"))
    some, facts = loss(NativeDecode(calibration="none", extra_bytes=0.2))
    assert 10 * most < least < 0.03
    assert some < 0.65 * least
    assert base["decode_bytes"] < facts["decode_bytes"] <= 1.2 * base["decode_bytes"]
    kinds = {row["layer"]: row["kind"] for row in facts["decode_layers"]}
    assert kinds[HEAD_PATH] == "w8"
    told = divergences(plain.model, linear_places(plain.model), "w4", 32)
    assert 0.5 < sum(told.values()) / (least - most) < 2


@pytest.mark.slow
def test_three_bits_and_four_lose_less_than_three_alone() -> None:
    plain = runtime_of("bundled:tiny")
    tokens = plain.sample(8, 96)
    expected = plain.model(input_ids=tokens, use_cache=False).logits[:, 8:].numpy()

    def loss(**parameters: Any) -> tuple[float, dict[str, Any]]:
        runtime = runtime_of("bundled:tiny", NativeDecode(calibration="none", **parameters))
        found = torch.stack(list(runtime.score(tokens, 8)), dim=1).numpy()
        return float(divergence(expected, found).mean()), runtime.notes.facts

    three, base = loss(weights="w3k")
    mixed, facts = loss(weights="w3k", extra_bytes=0.12)
    four, whole = loss(weights="w4k")
    assert 2 * four < three < 8 * four
    assert four < mixed < 0.65 * three
    assert facts["decode_bytes"] <= 1.12 * base["decode_bytes"] < 0.89 * whole["decode_bytes"]
    assert {row["kind"] for row in facts["decode_layers"]} == {"w3k", "w4k"}
    told = divergences(plain.model, linear_places(plain.model), "w3k", 32)
    assert 0.5 < sum(told.values()) / (three - four) < 2


@pytest.mark.parametrize(
    ("weights", "extra", "expected"),
    [
        ("w4", 0.0, {"w4"}),
        ("w4", 0.3, {"w4", "w8"}),
        ("w4", 1.0, {"w8"}),
        ("w3k", 0.0, {"w3k"}),
        ("w3k", 0.15, {"w3k", "w4k"}),
        ("w3k", 1.0, {"w4k"}),
    ],
)
def test_no_more_bytes_are_taken_than_were_offered(
    weights: WeightKind, extra: float, expected: set[str]
) -> None:
    base = packed(tiny_model("llama"), NativeDecode(calibration="none", weights=weights))[1]
    model, notes = packed(
        tiny_model("llama"), NativeDecode(calibration="none", weights=weights, extra_bytes=extra)
    )
    assert {row["kind"] for row in notes.facts["decode_layers"]} == expected
    least = base.facts["decode_bytes"]
    assert least <= notes.facts["decode_bytes"] <= (1 + extra) * least
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_information_is_the_mean_square_of_gradients(family: str) -> None:
    """Of each sequence's log-likelihood; of a tied head, and in addition of the embedding."""
    model = tiny_model(family).requires_grad_(False)
    places = linear_places(model)
    found = fisher_information(model, places, 32)
    tokens = sampled(model, VOCABULARY, SEQUENCES, 32, seed=0)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    is_tied = head.weight is embedding.weight
    if is_tied:
        head.weight = torch.nn.Parameter(embedding.weight.clone())
    model.requires_grad_(True)
    sums = {place.path: torch.zeros_like(weight_of(place.layer)) for place in places}
    for row in tokens:
        model.zero_grad()
        model(input_ids=row[None], labels=row[None], use_cache=False).loss.mul(len(row) - 1).backward()
        for place in places:
            gradient: Any = place.layer.weight.grad
            turned = type(place.layer).__name__ == "Conv1D"
            sums[place.path] += (gradient.T if turned else gradient).square()
        if is_tied:
            sums[HEAD_PATH] += embedding.weight.grad.square()
    predicted = SEQUENCES * (tokens.shape[1] - 1)
    for place in places:
        expected = sums[place.path].unflatten(1, (-1, 32)).mean(dim=2) / predicted
        torch.testing.assert_close(found[place.path], expected, rtol=1e-3, atol=1e-6)
