"""A tied head of 4 bits: what its errors cost is told before, and its finer rows are those that would cost the most."""

from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest
import torch

from optigpu.models.loading.load import load_model
from optigpu.models.loading.self_written import sampled
from optigpu.models.reference import parse_reference
from optigpu.ops.decode.cpu.packing import pack, unpack
from optigpu.surgery.places import linear_places
from optigpu.techniques.decoding.native_decode import NativeDecode, calibration
from optigpu.techniques.decoding.native_decode.calibration import moments_by_layer
from optigpu.techniques.decoding.native_decode.prediction import finer_rows
from optigpu.techniques.decoding.native_decode.programs import attached
from optigpu.techniques.decoding.native_decode.requirements import HEAD_PATH
from optigpu.techniques.decoding.native_decode.tied_table import TiedTable
from tests.engine.decoder_models import packed
from tests.engine.divergences import divergence_of
from tests.engine.tiny_models import VOCABULARY, tiny_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def bundled() -> Any:
    return load_model(parse_reference("bundled:tiny"), device="cpu", dtype="float32")


def untied(model: Any) -> Any:
    """With a head of its own."""
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone(), requires_grad=False)
    return model


@pytest.mark.parametrize("calibration", ["none", "self"])
@pytest.mark.parametrize("family", ["gpt2", "opt", "qwen2"])
def test_finer_rows_hold_what_rounding_has_left(family: str, calibration: Any) -> None:
    weight = tiny_model(family).lm_head.weight
    model, _ = packed(tiny_model(family), NativeDecode(calibration=calibration))
    head = attached(model).head
    assert head.finer is not None
    rows, plain = head.finer.rows, unpack(replace(head, finer=None))
    assert rows.equal(rows.unique())
    assert len(rows) == finer_rows(VOCABULARY) == 32
    error, before = ((weight - each)[rows].square().sum() for each in (unpack(head), plain))
    assert error < 0.05 * before
    others = torch.ones(VOCABULARY, dtype=torch.bool).index_fill(0, rows, False)
    assert unpack(head)[others].equal(plain[others])


def test_without_a_text_the_first_rows_are_finer() -> None:
    weight = tiny_model("gpt2").lm_head.weight
    head = attached(packed(tiny_model("gpt2"))[0]).head
    assert head.finer is not None
    assert head.finer.rows.tolist() == list(range(32))
    left = weight - unpack(replace(head, finer=None))
    assert unpack(head.finer.matrix).equal(unpack(pack(left[:32], None, "w4", 32)))


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("gpt2", {"head": "w8"}),
        ("gpt2", {"head": "bf16"}),
        ("gpt2", {"weights": "w8"}),
        ("gpt2", {"weights": "bf16"}),
    ],
    ids=str,
)
def test_other_heads_have_none(family: str, options: dict[str, Any]) -> None:
    model, _ = packed(tiny_model(family), NativeDecode(calibration="none", **options))
    assert attached(model).head.finer is None


def test_how_many_rows_are_finer() -> None:
    counts = {vocabulary: finer_rows(vocabulary) for vocabulary in (1, 20, 2048, 50257, 128256)}
    assert counts == {1: 1, 20: 16, 2048: 176, 50257: 1376, 128256: 2544}


@pytest.mark.slow
def test_what_small_errors_of_a_tied_table_cost_is_told() -> None:
    model, plain = bundled(), bundled()
    text = sampled(plain, 2048, 16, 64, seed=1)
    tied = TiedTable(model, text)
    head = [place for place in linear_places(model) if place.path == HEAD_PATH]
    ((_, moments),) = moments_by_layer(model, head, text)
    tied.weigh(moments, text.numel())
    with torch.no_grad():
        probability = plain(input_ids=text, use_cache=False).logits.softmax(dim=2).mean(dim=(0, 1))
        generator = torch.Generator().manual_seed(0)
        error = 0.02 * model.lm_head.weight.std() * torch.randn(2048, 256, generator=generator)
        told = 0.5 * float(probability @ (error @ moments[HEAD_PATH]).mul(error).sum(dim=1))
        model.lm_head.weight += error
    assert model.get_input_embeddings().weight is model.lm_head.weight
    assert 0.7 < divergence_of(model, plain, sampled(plain, 2048, 4, 128, seed=7)) / told < 1.4


@pytest.mark.slow
def test_one_table_costs_no_more_than_an_embedding_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = bundled()
    texts = [sampled(plain, 2048, 8, 128, seed=seed) for seed in (7, 8)]

    def costs(seed: int, *, tied: bool) -> float:
        monkeypatch.setattr(calibration, "SEED", seed)
        model = bundled() if tied else untied(bundled())
        packed(model, NativeDecode())
        assert tied or attached(model).embedding.kind == "w8"
        return fmean(divergence_of(model, plain, text) for text in texts)

    # One text that the model writes for its calibration moves the ratio by 3%.
    seeds = range(1, 6)
    one, two = (fmean(costs(seed, tied=tied) for seed in seeds) for tied in (True, False))
    assert one < 1.05 * two
