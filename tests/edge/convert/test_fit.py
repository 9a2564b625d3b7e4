"""Boards, what fits on them by numbers added by hand, and the prediction from published figures."""

import pytest

from optigpu.edge.fit import Place, fit, fit_board
from optigpu.edge.prediction import (
    check_claim,
    fastest_possible_s,
    fastest_published,
    predict,
    sources,
)
from optigpu.edge.published import Engine, published_figures
from optigpu.hardware.boards import Board, board, boards
from optigpu.hardware.catalog import find
from optigpu.vocabulary import SpecError
from tests.edge.convert.manifests import manifest

MACS = 10_666_928


def known(name: str) -> Board:
    found = board(name)
    assert found is not None
    return found


def test_the_boards_have_the_memories_of_their_names() -> None:
    assert len(boards()) == len({each.id for each in boards()})
    for each in boards():
        flash, _, psram = each.id.removeprefix("esp32s3-n").removesuffix("v").partition("r")
        assert (each.flash_bytes, each.psram_bytes) == (int(flash) * 2**20, int(psram or 0) * 2**20)
        assert (each.psram_bus is None) == (each.psram_bytes == 0)
        assert each.source
        assert each.chip.source
        assert each.module.casefold().endswith(each.id.removeprefix("esp32s3-"))


def test_a_board_is_found_by_its_id_and_by_its_module() -> None:
    assert board("esp32s3-n16r8") is board("ESP32-S3-WROOM-1-N16R8")
    assert board("esp32s3") is None


def test_the_peak_of_a_board_is_the_catalog_s() -> None:
    chip = find("ESP32-S3")
    assert chip is not None
    # 2 cores x 240 MHz x 16 multiply-accumulates
    assert known("esp32s3-n8").peak_macs_per_s() == 7.68e9 == chip.peak_flop_per_s["int8"] / 2
    assert known("esp32s3-n8").peak_macs_per_s(160_000_000) == 5.12e9
    assert fastest_possible_s(7_680_000, known("esp32s3-n8")) == pytest.approx(1e-3)


def test_a_small_arena_lies_in_sram_and_the_model_in_flash() -> None:
    found = fit_board(646_136, 210_288, known("esp32s3-n8"))
    # 8,388,608 - 2,097,152 of firmware - 262,144 of the agent - 646,136
    assert found.flash_left_bytes == 5_383_176
    # 327,680 - 61,440 of the agent's heap
    assert found.sram_bytes == 266_240
    assert (found.fits, found.arena, found.model_in_ram, found.reasons) == (True, Place.SRAM, None, ())


def test_the_last_byte_of_sram_is_used() -> None:
    n8r2 = known("esp32s3-n8r2")
    assert fit_board(100_000, 266_240, n8r2).arena is Place.SRAM
    assert fit_board(100_000, 266_241, n8r2).arena is Place.PSRAM
    assert fit_board(100_000, 166_240, n8r2).model_in_ram is Place.SRAM
    assert fit_board(100_000, 166_241, n8r2).model_in_ram is Place.PSRAM


def test_what_is_larger_than_sram_needs_psram() -> None:
    assert not (without := fit_board(646_136, 300_000, known("esp32s3-n8"))).fits
    assert without.arena is None
    assert "fits neither SRAM nor PSRAM, 266,240 bytes at most" in without.reasons[0]
    within = fit_board(646_136, 300_000, known("esp32s3-n8r2"))
    assert (within.fits, within.arena, within.model_in_ram) == (True, Place.PSRAM, Place.PSRAM)
    assert within.reasons == ("The tensor arena lies in quad PSRAM, which is slower than SRAM.",)


def test_a_model_and_its_arena_share_the_psram() -> None:
    n8r2 = known("esp32s3-n8r2")
    assert fit_board(2_097_152 - 300_000, 300_000, n8r2).model_in_ram is Place.PSRAM
    assert fit_board(2_097_153 - 300_000, 300_000, n8r2).model_in_ram is None


def test_a_model_that_is_larger_than_the_flash_says_by_how_much() -> None:
    # 4,194,304 - 2,359,296 of firmware and agent = 1,835,008
    found = fit_board(3_500_000, 200_000, known("esp32s3-n4"))
    assert (found.fits, found.flash_left_bytes) == (False, -1_664_992)
    assert found.reasons[0].startswith("The model is 1,664,992 bytes larger than the flash")


def test_a_manifest_is_judged_against_all_boards_or_one() -> None:
    assert [each.board for each in fit(manifest()).boards] == [each.id for each in boards()]
    assert [each.board for each in fit(manifest(), "esp32s3-n8").boards] == ["esp32s3-n8"]
    with pytest.raises(SpecError, match=r"Unknown board 'esp32s3-n16r9'\. Did you mean esp32s3-n16r"):
        fit(manifest(), "esp32s3-n16r9")


def test_operators_without_a_kernel_of_esp_nn_are_named() -> None:
    assert fit(manifest()).unaccelerated == ("MEAN",)


def test_a_model_without_macs_has_no_prediction() -> None:
    found = fit(manifest(operators=[{"name": "ADD", "count": 1, "macs": 0}], macs=0))
    assert (found.prediction, found.claim) == (None, None)


def test_only_mobilenet_is_held_against_the_founding_claim() -> None:
    assert fit(manifest(network={"family": "file", "input": [96, 96, 3]})).claim is None


def test_published_figures_give_these_rates() -> None:
    rates = {
        (each.name, each.engine, each.cores): each.macs_per_s / 1e6
        for each in published_figures()
        if each.macs_per_s is not None
    }
    expected = {
        ("person detection", Engine.ESP_NN, 1): 7.157888 / 0.054,
        ("person detection", Engine.REFERENCE, 1): 7.157888 / 2.3,
        ("MobileNetV3-Small", Engine.ESP_NN, 1): 56 / 1.434,
        ("MobileNetV3-Small", Engine.REFERENCE, 1): 56 / 26,
        ("MobileNetV2", Engine.ESP_DL, 1): 300 / 1.3095,
        ("MobileNetV2", Engine.ESP_DL, 2): 300 / 0.867,
        ("ESPDet-pico", Engine.ESP_DL, 1): 85 / 0.1316,
    }
    assert rates == pytest.approx(expected)
    assert {each.latency_s for each in published_figures() if each.macs is None} == {0.0331, 0.0058}


def test_the_macs_of_person_detection_are_those_of_its_layers() -> None:
    """MobileNetV1 of width 0.25 at 96x96x1: a convolution, 13 pairs of depthwise and 1x1, two classes."""
    side, channels, macs = 48, 8, 48 * 48 * 8 * 9
    for stride, width in (
        (1, 16),
        (2, 32),
        (1, 32),
        (2, 64),
        (1, 64),
        (2, 128),
        *((1, 128),) * 5,
        (2, 256),
        (1, 256),
    ):
        side //= stride
        macs += side * side * channels * (9 + width)
        channels = width
    assert macs + 256 * 2 == published_figures()[0].macs


def test_a_prediction_spans_the_published_rates() -> None:
    found = predict(MACS)
    assert found.low_s == pytest.approx(MACS * 0.054 / 7_157_888)
    assert found.high_s == pytest.approx(MACS * 1.434 / 56_000_000)
    assert (found.kind, round(found.low_s * 1e3), round(found.high_s * 1e3)) == ("prediction", 80, 273)
    assert found.max_fps == pytest.approx(1 / found.low_s)
    slower = predict(MACS, clock_hz=160_000_000)
    assert (slower.low_s, slower.high_s) == pytest.approx((found.low_s * 1.5, found.high_s * 1.5))
    assert all("github.com/espressif" in sentence for sentence in sources([found, slower]))
    assert len(sources([found, slower])) == 2


def test_the_founding_claim_is_implausible_at_96_and_up() -> None:
    """MobileNetV2's MACs by Keras, in millions: width 0.35 and 1.0 at 96, width 1.0 at 224; and one at 48."""
    best = fastest_published()
    assert (best.name, best.cores, best.latency_s) == ("MobileNetV2", 2, 0.867)
    for macs in (MACS, 56_000_000, 300_000_000):
        found = check_claim(macs)
        assert not found.plausible
        assert (
            found.needed_macs_per_s == 50 * macs > found.published_macs_per_s == pytest.approx(300e6 / 0.867)
        )
        assert found.possible == (50 * macs <= 7.68e9)
    assert "50 FPS at 0.5 W are not" in check_claim(MACS).sentence
    assert "impossible here: 50 FPS of 300.0 million MACs take 15,000" in check_claim(300_000_000).sentence
    assert "at most 32.4 FPS" in check_claim(MACS).sentence
    assert check_claim(3_195_424).plausible
