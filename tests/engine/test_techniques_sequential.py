"""Sequential calibration: layers are given what the packed ones before them give, and make up for the difference."""

from typing import Any

import pytest
import torch

from optigpu.models.loading.load import load_model
from optigpu.models.loading.self_written import sampled
from optigpu.models.reference import parse_reference
from optigpu.ops.four_bits.compensated import DAMPING
from optigpu.surgery.places import linear_places, weight_of
from optigpu.techniques.decoding.native_decode import NativeDecode, calibration, packing, sequential
from optigpu.techniques.decoding.native_decode.calibration import ROWS_AT_ONCE, SELF
from optigpu.techniques.decoding.native_decode.layers import exchange_linears
from optigpu.techniques.decoding.native_decode.requirements import HEAD_PATH, has_tied_head
from optigpu.techniques.decoding.native_decode.sequential import SHARE, sequential_moments
from tests.engine.decoder_models import DECODERS, decoder_model, packed
from tests.engine.divergences import divergence_of
from tests.engine.tiny_models import VOCABULARY

pytestmark = pytest.mark.usefixtures("one_torch_thread")
TINY = parse_reference("bundled:tiny")


def inputs_of(model: Any, paths: list[str], text: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a whole pass gives the layers at these paths, float64 [tokens, inputs]."""
    found = {}
    for path in paths:
        model.get_submodule(path).register_forward_hook(
            lambda _, inputs, __, path=path: found.update({path: inputs[0].flatten(0, -2).double()})
        )
    with torch.no_grad():
        model(text)
    return found


@pytest.mark.parametrize("name", DECODERS)
def test_layers_are_given_what_the_packed_model_gives_and_aim_at_what_the_plain_one_would(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (calibration, sequential):
        monkeypatch.setattr(module, "product_type", lambda _: torch.float32)
    text = torch.randint(0, VOCABULARY, (2 * ROWS_AT_ONCE, 9), generator=torch.Generator().manual_seed(0))
    plain, model = decoder_model(name), decoder_model(name)
    places = linear_places(model)
    paths = [place.path for place in places]
    tied = has_tied_head(model)
    moments: dict[str, torch.Tensor] = {}
    aims: dict[str, torch.Tensor] = {}
    for part, found in sequential_moments(model, places, text):
        moments |= found
        aims |= {place.path: weight_of(place.layer).double() for place in part}
        exchange_linears(part, dict.fromkeys(found, "w4"), 32, None, found)
    wished, given = inputs_of(plain, paths, text), inputs_of(model, paths, text)
    assert sorted(moments) == sorted(paths)
    for path in paths:
        x, moment = given[path], given[path].T @ given[path]
        size = moment.diagonal().mean()
        torch.testing.assert_close(moments[path].double(), moment, rtol=1e-3, atol=1e-4 * float(size))
        weight = weight_of(plain.get_submodule(path)).double()
        drift = (wished[path] - x).T @ x
        damped = moment + DAMPING * size * torch.eye(len(moment))
        change = 0.0 if tied and path == HEAD_PATH else SHARE * weight @ drift @ damped.inverse()
        torch.testing.assert_close(aims[path], weight + change, rtol=0.0, atol=2e-3 * float(weight.std()))
    assert any((wished[path] - given[path]).abs().max() > 0.01 for path in paths)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["w3k", "w4k"])
def test_layers_that_make_up_for_earlier_ones_diverge_less_on_text_that_they_have_not_seen(
    weights: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "SEQUENTIAL", SELF)  # so that more text does not help
    plain = load_model(TINY, device="cpu", dtype="float32")
    text = sampled(plain, 2048, 16, 128, seed=7)

    def loss(how: Any) -> float:
        model = load_model(TINY, device="cpu", dtype="float32")
        return divergence_of(packed(model, NativeDecode(weights=weights, calibration=how))[0], plain, text)

    assert loss("sequential") < 0.95 * loss("self")


@pytest.mark.slow
def test_bytes_go_where_calibration_leaves_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = load_model(TINY, device="cpu", dtype="float32")
    text = sampled(plain, 2048, 16, 128, seed=7)
    technique = NativeDecode(weights="w3k", extra_bytes=0.1)

    def mixed() -> tuple[float, int]:
        model, notes = packed(load_model(TINY, device="cpu", dtype="float32"), technique)
        return divergence_of(model, plain, text), notes.facts["decode_bytes"]

    aware, size = mixed()
    monkeypatch.setattr(packing, "share_left", lambda _: 1.0)
    unaware, other_size = mixed()
    assert size <= other_size
    assert aware < 0.95 * unaware
