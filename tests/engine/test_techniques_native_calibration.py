"""native_decode's calibration: the text that the model writes, what layers are given by it, and where bytes go."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from optigpu.models.held import MODELS_DIR
from optigpu.models.loading.load import load_model
from optigpu.models.loading.self_written import sampled
from optigpu.models.reference import parse_reference
from optigpu.ops.decode.cpu.packing import unpack
from optigpu.ops.decode.program import WeightKind
from optigpu.ops.four_bits.compensated import DAMPING, SHRINKAGE
from optigpu.ops.four_bits.few_bits import product_type
from optigpu.quality.divergence import divergence
from optigpu.surgery.places import linear_places, weight_of
from optigpu.techniques.base import Notes
from optigpu.techniques.decoding.native_decode import NativeDecode, calibration, packing, sequential
from optigpu.techniques.decoding.native_decode.calibration import (
    ROWS_AT_ONCE,
    SELF,
    TextSize,
    calibration_text,
    in_product_type,
    moments_by_layer,
)
from optigpu.techniques.decoding.native_decode.layers import exchange_linears
from optigpu.techniques.decoding.native_decode.prediction import finer_rows
from optigpu.techniques.decoding.native_decode.programs import HEAD_PATH, attached, has_tied_head
from optigpu.techniques.decoding.native_decode.sensitivity import ROWS as SEQUENCES
from optigpu.techniques.decoding.native_decode.sensitivity import divergences, fisher_information
from optigpu.techniques.decoding.native_decode.sequential import SHARE, sequential_moments
from optigpu.vocabulary import UnsupportedError
from tests.breadth import cases, spread
from tests.engine.decoder_models import DECODERS, decoder_model, divergence_of, packed
from tests.engine.tiny_models import FAMILIES, VOCABULARY, runtime_of, tiny_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def inputs_of(model: Any, text: torch.Tensor) -> dict[str, torch.Tensor]:
    """By the paths of all linear layers, as torch's own hooks see them, float64 [tokens, inputs]."""
    found: dict[str, list[torch.Tensor]] = {place.path: [] for place in linear_places(model)}
    for place in linear_places(model):
        place.layer.register_forward_hook(
            lambda _, inputs, __, path=place.path: found[path].append(inputs[0].flatten(0, -2).double())
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
    expected = inputs_of(decoder_model(name), text)
    places = linear_places(model)
    seen = 0
    for part, moments in moments_by_layer(model, places, text):
        for place in part:
            moment, x = moments[place.path], expected[place.path]
            assert moment.equal(moment.T)
            atol = 1e-4 * float(x.square().sum(0).max())
            # Whether torch rounds the operands of this product, as it may, depends on the processor.
            multiplied = (x, x.to(products).double())
            assert any(torch.allclose(moment.double(), y.T @ y, 1e-4, atol) for y in multiplied)
            seen += 1
    assert seen == len(places)


@pytest.mark.parametrize("family", cases(["gpt2", "llama", "opt"]))
def test_a_text_is_the_model_s_own_and_leaves_it_as_it_was(family: str) -> None:
    """Drawn tokens are as likely to the model itself as its own draws are on average."""
    model = decoder_model(family)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    text = calibration_text(model)
    assert text.equal(calibration_text(model))
    assert torch.get_rng_state().equal(state)
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())
    assert all(weight_of(place.layer).is_floating_point() for place in linear_places(model))
    assert text.shape == (SELF.rows, min(SELF.length, model.config.max_position_embeddings))
    assert text[:, 0].eq(model.config.bos_token_id).all()
    assert len(text.unique(dim=0)) == SELF.rows
    longer = calibration_text(model, TextSize(64, SELF.length))
    with torch.no_grad():
        chances = model(longer[:, :-1]).logits.softmax(-1)
    drawn = chances.gather(-1, longer[:, 1:, None]).mean()
    expected = chances.square().sum(-1).mean()
    torch.testing.assert_close(drawn, expected, rtol=0.05, atol=0.0)


@pytest.mark.slow
def test_calibration_makes_errors_up_for_each_other_on_text_that_it_has_not_seen() -> None:
    plain = bundled()
    text = sampled(plain, 2048, 4, 128, seed=7)
    without, with_ = (
        packed(bundled(), technique)[0]
        for technique in (NativeDecode(weights="w4", calibration="none"), NativeDecode(weights="w4"))
    )
    assert divergence_of(with_, plain, text) < 0.6 * divergence_of(without, plain, text)


@pytest.mark.slow
@pytest.mark.parametrize("family", cases(FAMILIES))
def test_calibration_keeps_bytes_and_kinds_and_is_the_same_each_time(family: str) -> None:
    once, notes = packed(tiny_model(family), NativeDecode(weights="w4"))
    again, _ = packed(tiny_model(family), NativeDecode(weights="w4"))
    _, plain = packed(tiny_model(family), NativeDecode(weights="w4", calibration="none"))
    assert notes.facts["decode_calibration"] == "self"
    assert plain.facts["decode_calibration"] == "none"
    assert notes.facts["decode_layers"] == plain.facts["decode_layers"]
    for place in linear_places(tiny_model(family)):
        one, other = (unpack(model.get_submodule(place.path).matrix) for model in (once, again))
        assert one.equal(other)


# ---- One layer after another.


def layer_inputs_of(model: Any, paths: list[str], text: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a whole pass gives the layers at these paths, float64 [tokens, inputs]."""
    found = {}
    for path in paths:
        model.get_submodule(path).register_forward_hook(
            lambda _, inputs, __, path=path: found.update({path: inputs[0].flatten(0, -2).double()})
        )
    with torch.no_grad():
        model(text)
    return found


BLOCKS_OF_LAYERS = [name for name in DECODERS if name not in ("qwen2_moe", "glm4_moe")]
"""Mixtures with shared experts are refused by `sequential`."""


@pytest.mark.parametrize("name", cases(BLOCKS_OF_LAYERS, 3))
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
    wished, given = layer_inputs_of(plain, paths, text), layer_inputs_of(model, paths, text)
    assert sorted(moments) == sorted(paths)
    for path in paths:
        x, moment = given[path], given[path].T @ given[path]
        size = moment.diagonal().mean()
        torch.testing.assert_close(moments[path].double(), moment, rtol=1e-3, atol=1e-4 * float(size))
        weight = weight_of(plain.get_submodule(path)).double()
        drift = (wished[path] - x).T @ x
        damped = moment + torch.diag(SHRINKAGE * moment.diagonal() + DAMPING * size)
        change = 0.0 if tied and path == HEAD_PATH else SHARE * weight @ drift @ damped.inverse()
        torch.testing.assert_close(aims[path], weight + change, rtol=0.0, atol=2e-3 * float(weight.std()))
    assert any((wished[path] - given[path]).abs().max() > 0.01 for path in paths)


@pytest.mark.long
@pytest.mark.parametrize("weights", ["w3k", "w4k"])
def test_layers_that_make_up_for_earlier_ones_diverge_less_on_text_that_they_have_not_seen(
    weights: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "SEQUENTIAL", SELF)  # so that more text does not help
    plain = bundled()
    text = sampled(plain, 2048, 16, 128, seed=7)

    def loss(how: Any) -> float:
        model = bundled()
        return divergence_of(packed(model, NativeDecode(weights=weights, calibration=how))[0], plain, text)

    ratios = []
    for seed in range(1, 5):  # a single text to calibrate on gives 0.92 to 0.96
        monkeypatch.setattr(calibration, "SEED", seed)
        ratios.append(loss("sequential") / loss("self"))
    assert sum(ratios) / len(ratios) < 0.95


# ---- Where bytes go.


class Loss:
    """How far a model diverges from itself in float32 on a text that it wrote."""

    def __init__(self, model: str = "bundled:tiny") -> None:
        self.plain, self._model = runtime_of(model), model
        self._tokens = self.plain.sample(8, 96)
        self._expected = self.plain.model(input_ids=self._tokens, use_cache=False).logits[:, 8:].numpy()

    def of(self, **parameters: Any) -> tuple[float, dict[str, Any]]:
        """In nats, with the facts."""
        native = NativeDecode(**{"weights": "w4", "calibration": "none"} | parameters)
        runtime = runtime_of(self._model, native)
        found = torch.stack(list(runtime.score(self._tokens, 8)), dim=1).numpy()
        return float(divergence(self._expected, found).mean()), runtime.notes.facts

    def told(self, kind: WeightKind) -> float:
        """How much more than with w8, as it is predicted."""
        model = self.plain.model
        costs = divergences(model, linear_places(model), (kind, "w8"), 32).values()
        return sum(more - less for more, less in costs)


@pytest.mark.slow
def test_more_bytes_go_where_the_divergence_is_largest() -> None:
    loss = Loss()
    least, base = loss.of()
    most, _ = loss.of(weights="w8")
    some, facts = loss.of(extra_bytes=0.2)
    assert 10 * most < least < 0.03
    assert some < 0.35 * least
    assert base["decode_bytes"] < facts["decode_bytes"] <= 1.2 * base["decode_bytes"]
    kinds = {row["layer"]: row["kind"] for row in facts["decode_layers"]}
    assert kinds[HEAD_PATH] == "w6"
    assert 0.5 < loss.told("w4") / (least - most) < 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", ["bundled:tiny", pytest.param("path:smollm2-135m", marks=pytest.mark.real_model)]
)
def test_bits_are_chosen_that_keep_the_model_within_a_limit(
    model: str, smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MODELS_DIR, str(smollm2))
    loss = Loss(model)
    near, far = (loss.of(weights="auto", max_kld=limit) for limit in (0.02, 0.05))
    for (found, facts), limit in ((near, 0.02), (far, 0.05)):
        assert limit / 4 < facts["decode_divergence"] <= limit
        assert found < limit
        assert len({row["kind"] for row in facts["decode_layers"]}) > 1
    assert far[1]["decode_bytes"] < near[1]["decode_bytes"] < loss.of(weights="w8")[1]["decode_bytes"]


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_a_limit_that_eight_bits_miss_is_refused_and_leaves_the_model_as_it_was(name: str) -> None:
    plain, model = decoder_model(name), decoder_model(name)
    with pytest.raises(UnsupportedError, match=r"do not keep this model within max_kld 1e-09; .* lowest is"):
        NativeDecode(max_kld=1e-9).modules(model, Notes())
    text = torch.arange(8)[None]
    assert model(text).logits.equal(plain(text).logits)
    _, notes = packed(model, NativeDecode(calibration="none"))
    assert name == "llama" or len({row["kind"] for row in notes.facts["decode_layers"]}) == 1


@pytest.mark.parametrize(
    ("weights", "extra", "expected"),
    [
        ("w4", 0.0, {"w4"}),
        ("w4", 0.3, {"w4", "w5", "w6", "w8"}),
        ("w4", 1.0, {"w8"}),
        ("w3k", 0.15, {"w3k", "w4k", "w5"}),
        ("w5", 0.1, {"w5", "w6", "w8"}),
        ("w6", 0.4, {"w8"}),
    ],
)
def test_no_more_bytes_are_taken_than_were_offered(
    weights: WeightKind, extra: float, expected: set[str]
) -> None:
    plain = NativeDecode(calibration="none", weights=weights)
    base = packed(tiny_model("llama"), plain)[1]
    model, notes = packed(tiny_model("llama"), plain.model_copy(update={"extra_bytes": extra}))
    assert {row["kind"] for row in notes.facts["decode_layers"]} == expected
    least = base.facts["decode_bytes"]
    assert least <= notes.facts["decode_bytes"] <= (1 + extra) * least
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("family", cases(FAMILIES))
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


# ---- A head that is the embedding too.


def bundled() -> Any:
    return load_model(parse_reference("bundled:tiny"), device="cpu", dtype="float32")


@pytest.mark.parametrize(
    ("calibration", "family"), spread(["none", "self"], ["gpt2", "opt", "qwen2"], by_default=3)
)
def test_finer_rows_hold_what_rounding_has_left(family: str, calibration: Any) -> None:
    weight = tiny_model(family).lm_head.weight
    model, _ = packed(tiny_model(family), NativeDecode(weights="w4", calibration=calibration))
    head = attached(model).head
    assert head.finer is not None
    rows, plain = head.finer.rows, unpack(replace(head, finer=None))
    assert rows.equal(rows.unique())
    assert len(rows) == finer_rows(VOCABULARY) == 32
    error, before = ((weight - each)[rows].square().sum() for each in (unpack(head), plain))
    assert error < 0.05 * before
    others = torch.ones(VOCABULARY, dtype=torch.bool).index_fill(0, rows, False)
    assert unpack(head)[others].equal(plain[others])
