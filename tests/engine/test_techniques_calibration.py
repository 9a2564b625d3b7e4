"""What native_decode is calibrated on: a text that the model wrote, and what its layers are given by it."""

from typing import Any

import pytest
import torch

from optigpu.ops.four_bits.few_bits import product_type
from optigpu.surgery.places import linear_places, weight_of
from optigpu.techniques.decoding.native_decode import NativeDecode, calibration, packing
from optigpu.techniques.decoding.native_decode.calibration import (
    ROWS_AT_ONCE,
    SELF,
    SEQUENTIAL,
    calibration_text,
    in_product_type,
    moments_by_layer,
)
from tests.breadth import cases, spread
from tests.engine.decoder_models import DECODERS, decoder_model, packed
from tests.engine.tiny_models import VOCABULARY, tiny_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def inputs_of(model: Any, text: torch.Tensor, products: torch.dtype) -> dict[str, torch.Tensor]:
    """By the paths of all linear layers, as torch's own hooks see them, rounded as they are for products, float64
    [tokens, inputs]."""
    found: dict[str, list[torch.Tensor]] = {place.path: [] for place in linear_places(model)}
    for place in linear_places(model):
        place.layer.register_forward_hook(
            lambda _, inputs, __, path=place.path: found[path].append(
                inputs[0].flatten(0, -2).to(products).double()
            )
        )
    with torch.no_grad(), in_product_type(model):
        for rows in text.split(ROWS_AT_ONCE):  # products of other shapes may round otherwise
            model(rows)
    return {path: torch.cat(parts) for path, parts in found.items()}


@pytest.mark.parametrize(("has_bfloat16", "name"), spread([True, False], DECODERS))
def test_moments_are_those_of_what_each_layer_is_given(
    name: str, has_bfloat16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    products = product_type(torch.device("cpu")) if has_bfloat16 else torch.float32
    monkeypatch.setattr(calibration, "product_type", lambda _: products)
    text = torch.randint(0, VOCABULARY, (20, 9), generator=torch.Generator().manual_seed(0))
    model = decoder_model(name)
    expected = inputs_of(decoder_model(name), text, products)
    places = linear_places(model)
    seen = 0
    for part, moments in moments_by_layer(model, places, text):
        for place in part:
            moment, x = moments[place.path], expected[place.path]
            assert moment.equal(moment.T)
            torch.testing.assert_close(
                moment.double(), x.T @ x, rtol=1e-4, atol=1e-4 * float(x.square().sum(0).max())
            )
            seen += 1
    assert seen == len(places)


def test_layers_with_the_same_inputs_share_a_moment() -> None:
    model = tiny_model("llama")
    places = linear_places(model)
    (moments,) = [found for _, found in moments_by_layer(model, places, torch.zeros(10, 4, dtype=torch.long))]
    paths = [place.path for place in places if place.path.endswith(("q_proj", "k_proj", "v_proj"))]
    first = moments[paths[0]]
    assert all(moments[path] is first for path in paths[:3])
    assert moments[paths[3]] is not first


@pytest.mark.parametrize("family", cases(["gpt2", "llama", "opt"]))
def test_a_text_is_the_model_s_own_and_leaves_it_as_it_was(family: str) -> None:
    """Drawn tokens are as likely to the model itself as its own draws are on average."""
    model = decoder_model(family)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    text = calibration_text(model, 32)
    assert text.equal(calibration_text(model, 32))
    assert torch.get_rng_state().equal(state)
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())
    assert all(weight_of(place.layer).is_floating_point() for place in linear_places(model))
    assert text.shape == (SELF.rows, min(SELF.length, model.config.max_position_embeddings))
    assert text[:, 0].eq(model.config.bos_token_id).all()
    assert len(text.unique(dim=0)) == SELF.rows
    with torch.no_grad():
        chances = model(text[:, :-1]).logits.softmax(-1)
    drawn = chances.gather(-1, text[:, 1:, None]).mean()
    expected = chances.square().sum(-1).mean()
    torch.testing.assert_close(drawn, expected, rtol=0.05, atol=0.0)


def test_sequential_calibration_reads_the_longer_text(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[torch.Size] = []

    def watched(*asked: Any) -> torch.Tensor:
        text = calibration_text(*asked)
        read.append(text.shape)
        return text

    monkeypatch.setattr(packing, "calibration_text", watched)
    for how in ("self", "sequential"):
        packed(decoder_model("gpt2"), NativeDecode(calibration=how))
    longest = decoder_model("gpt2").config.max_position_embeddings
    assert read == [(size.rows, min(size.length, longest)) for size in (SELF, SEQUENTIAL)]
