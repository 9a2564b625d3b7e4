"""Quality that cannot be had is null, with one sentence that says why and what to do."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from optigpu.backends.torch.operators import TorchOperatorRuntime
from optigpu.meters.base import MeterContext, QualityOptions
from optigpu.meters.quality import QUALITY_FOLDER, QualityMeter, make_reference
from optigpu.vocabulary import DeviceKind
from optigpu.workloads.matmul import Matmul
from tests.engine.quality_contexts import VOCABULARY, Broken, assert_nothing, context, context_of, measured
from tests.engine.tiny_models import runtime_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("trained_model")]


def test_random_weights_have_no_quality(tmp_path: Path) -> None:
    name = "preset:tiny-llama-test"
    random = context_of(runtime_of(name), tmp_path, model=name)
    for reading in (make_reference(random), QualityMeter().read(random)):
        assert_nothing(reading, "random weights, which do not behave like trained ones")


def test_a_workload_that_decodes_nothing_has_no_quality(tmp_path: Path) -> None:
    runtime = TorchOperatorRuntime(DeviceKind.CPU, seed=0)
    workload = Matmul(sizes=(8,))
    bare = MeterContext(runtime, workload.prepare(runtime), workload, None, tmp_path, 0, QualityOptions())
    assert_nothing(QualityMeter().read(bare), "matmul decodes nothing")


def test_without_a_reference_there_is_a_reason(tmp_path: Path) -> None:
    assert_nothing(QualityMeter().read(context(tmp_path)), "the process that makes it failed")


def test_why_there_is_no_reference_is_what_every_variant_says(tmp_path: Path, language_dir: Path) -> None:
    reading = make_reference(context(tmp_path, text="file:missing.txt"))
    assert_nothing(reading, r"missing.txt under .* cannot be read")
    (language_dir / "missing.txt").write_text("here it is by now, and too late for this job")
    again = QualityMeter().read(context(tmp_path, text="file:missing.txt"))
    assert again.reasons == reading.reasons


def test_a_dataset_that_changed_while_the_job_ran_is_a_reason(tmp_path: Path, language_dir: Path) -> None:
    make_reference(context(tmp_path, text="file:mine.txt"))
    with (language_dir / "mine.txt").open("a") as text:
        text.write(" More.")
    assert_nothing(QualityMeter().read(context(tmp_path, text="file:mine.txt")), "changed while the job ran")


@pytest.mark.parametrize(
    ("change", "name"), [({"seed": 1}, "seed 0"), ({"quality": QualityOptions(tokens=64)}, "tokens 512")]
)
def test_a_reference_for_another_setting_is_none(change: dict[str, Any], name: str, tmp_path: Path) -> None:
    make_reference(context(tmp_path))
    reading = QualityMeter().read(replace(context(tmp_path), **change))
    assert_nothing(reading, f"was made for {name} but this variant has")


def test_a_text_shorter_than_one_window_is_a_reason(tmp_path: Path, language_dir: Path) -> None:
    (language_dir / "short.txt").write_text("The fox.")
    assert_nothing(make_reference(context(tmp_path, text="file:short.txt")), "fewer than one window of 64")


def test_a_window_longer_than_what_is_timed_is_a_reason(tmp_path: Path, language_dir: Path) -> None:
    reading = make_reference(context(tmp_path, text="file:mine.txt", window=65))
    assert_nothing(reading, "quality.window is 65 tokens and the workload decodes 64")


def test_a_stride_that_leaves_no_context_is_a_reason(tmp_path: Path, language_dir: Path) -> None:
    reading = make_reference(context(tmp_path, text="file:mine.txt", stride=64))
    assert_nothing(reading, "quality.stride is 64 tokens and a window has 64")


@pytest.mark.parametrize("text", ["hellaswag", "file:mine.txt"])
def test_a_corrupt_dataset_is_a_reason(text: str, tmp_path: Path, language_dir: Path) -> None:
    for path in (language_dir / "mine.txt", language_dir / "hellaswag" / "hellaswag_val_full.txt.bz2"):
        path.write_bytes(b"\xff\xfe" * 100)
    assert_nothing(make_reference(context(tmp_path, text=text)), "corrupt|not UTF-8")


def test_a_reference_that_was_tampered_with_or_cut_is_a_reason(tmp_path: Path) -> None:
    make_reference(context(tmp_path))
    logits = tmp_path / QUALITY_FOLDER / "logits.f32"
    logits.write_bytes(logits.read_bytes()[:-4])
    assert_nothing(QualityMeter().read(context(tmp_path)), "truncated")
    manifest = tmp_path / QUALITY_FOLDER / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"passages_sha256": "0" * 64}))
    assert_nothing(QualityMeter().read(context(tmp_path)), "do not match its manifest")


def test_a_disk_without_room_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=100_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert_nothing(make_reference(context(tmp_path)), r"need 0\.0 GB on disk, but only 0\.0 GB are free")


def test_more_positions_than_the_disk_is_for_count_for_perplexity_alone(
    tmp_path: Path, language_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optigpu.quality.reference.MOST_LOGIT_BYTES", 100 * VOCABULARY * 4)
    reading = measured(tmp_path, text="file:mine.txt", tokens=300)
    facts = reading.facts.model_dump()["quality"]
    assert (facts["kld_positions"], facts["positions"]) == (100, 299)
    assert (tmp_path / QUALITY_FOLDER / "logits.f32").stat().st_size == 100 * VOCABULARY * 4


def test_logits_that_are_no_numbers_are_a_reason(tmp_path: Path) -> None:
    assert_nothing(measured(tmp_path, Broken()), f"{VOCABULARY} of {VOCABULARY} logits are NaN or infinite")
