"""Programs of converters: a file for each shape, the same end wherever they run, and a disk that is full."""

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from optigpu.backends.converted import REFUSED, Converter, model_arguments, written
from optigpu.backends.coreml import admit, package_of
from optigpu.backends.export import folder_of
from optigpu.documents.result import Outcome
from optigpu.programs import (
    ResidentProgram,
    Run,
    programs_run_by,
    run_alone,
    run_program,
)
from optigpu.techniques.quantization.gguf import Gguf
from optigpu.techniques.quantization.openvino_int8 import OpenVinoInt8
from optigpu.techniques.quantization.vllm_bf16 import VllmBf16
from optigpu.vocabulary import OptiGPUError, UnsupportedError, VariantStatus
from tests.engine.caches import BUILDS, OPERATORS, PEAKS, cache_with, largest_file, resident_converter
from tests.engine.converted_engines import ordered, prepared
from tests.engine.sessions import brief_job, measured
from tests.pages import ROOT

CONVERTER = Converter("forms", "tests.engine.children.told", ".json", (), ())


@pytest.mark.slow
def test_a_model_is_written_once_for_each_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_with(tmp_path).parent))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    said: list[str] = []
    order = ordered(tmp_path, seed=3, threads=2)
    arguments = model_arguments(order)
    made = [CONVERTER.made(order, form, arguments, said.append, "writing") for form in ("a", "a", "b")]
    assert made[0] == made[1] != made[2]
    assert said == ["writing", "writing"]
    assert json.loads(made[0].read_text("ascii")) == {
        "model": "bundled:tiny",
        "seed": 3,
        "threads": 2,
    }


def test_a_stack_that_changes_weights_is_refused(tmp_path: Path) -> None:
    admit(ordered(tmp_path))
    with pytest.raises(UnsupportedError, match="runs float32 alone here, not bfloat16; leave the technique"):
        admit(ordered(tmp_path, VllmBf16()))


PROGRAM = "tests.engine.children.ending_converter"


@pytest.fixture(scope="module")
def resident() -> Iterator[ResidentProgram]:
    converter = ResidentProgram()
    yield converter
    converter.end()


@pytest.fixture(params=["alone", "resident"])
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, resident: ResidentProgram) -> Run:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return run_alone if request.param == "alone" else resident.run


@pytest.mark.slow
def test_a_program_ends_the_same_wherever_it_runs(runner: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTIGPU_TEST_WHAT", "heads")
    assert runner(PROGRAM, ["refuse"]) == (REFUSED, "No heads.\n", "")
    raised = runner(PROGRAM, ["raise"])
    assert (raised.status, raised.err.splitlines()[-1]) == (1, "ValueError: no such layer")
    assert runner(PROGRAM, ["exit"]) == (2, "", "")
    assert runner(PROGRAM, ["die"]).status == -signal.SIGKILL


@pytest.mark.slow
def test_the_one_that_stays_runs_all_until_it_dies_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    converter = ResidentProgram()
    with programs_run_by(converter.run):
        first, second = (run_program(PROGRAM, ["print"]).out for _ in range(2))
        run_program(PROGRAM, ["die"])
        third = run_program(PROGRAM, ["print"]).out
    assert first == second != third
    assert run_program(PROGRAM, ["print"]).out not in {first, third}
    converter.end()


SMALL = "preset:tiny-llama-test"
TOO_LITTLE = 1_200_000
"""Bytes: less than SMALL in float32 and TINY in 8 bits, and more than Python writes of a module that it compiles."""
NO_SPACE = (
    r"there is no space for it in .*{engine} \(.*\); free some, or name another folder in XDG_CACHE_HOME"
)

Convert = Callable[[Path], object]
PLAIN: list[Any] = [
    pytest.param("gguf", lambda folder: prepared("llama_cpp", folder, model=SMALL), marks=pytest.mark.llama),
    pytest.param(
        "onnxruntime",
        lambda folder: prepared("onnxruntime", folder, model=SMALL),
        marks=pytest.mark.onnxruntime,
    ),
    pytest.param(
        "openvino", lambda folder: prepared("openvino", folder, model=SMALL), marks=pytest.mark.openvino
    ),
    pytest.param(
        "coreml",
        lambda folder: package_of(ordered(folder, model=SMALL), 1, 8, lambda _: None),
        marks=pytest.mark.coreml,
    ),
    ("vllm", lambda folder: folder_of("vllm", ordered(folder, model=SMALL), lambda _: None)),
]
"""By the folder of kept models: what writes one of the model in its engine's format."""
QUANTIZED: list[Any] = [
    pytest.param(
        *("gguf", lambda folder: prepared("llama_cpp", folder, Gguf(type="F16"))),
        lambda folder: prepared("llama_cpp", folder, Gguf(type="Q8_0")),
        marks=pytest.mark.llama,
        id="gguf",
    ),
    pytest.param(
        *("openvino", lambda folder: prepared("openvino", folder)),
        lambda folder: prepared("openvino", folder, OpenVinoInt8()),
        marks=pytest.mark.openvino,
        id="openvino",
    ),
]
"""A format that another one is made of, which is written first."""


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the folders of converted models are."""
    folder = cache_with(tmp_path, BUILDS, OPERATORS, PEAKS)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parent))
    monkeypatch.setenv("OPTIGPU_DATA_DIR", str(tmp_path / "data"))
    return folder / "converted"


@pytest.fixture
def one_converter() -> Iterator[None]:
    """All converters run in one process, where a limit can be put on one that runs already."""
    with resident_converter() if sys.platform == "linux" else nullcontext():
        yield


def models_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.suffix != ".lock"]


def write_half(output: Path, error: Exception) -> None:
    """What a library does whose disk is full half-way."""
    output.mkdir()
    with (output / "weights").open("wb", buffering=0) as file:
        file.write(bytes(2 * TOO_LITTLE))
    raise error


@pytest.mark.usefixtures("forked_children")
@pytest.mark.parametrize("error", [RuntimeError("iostream error"), UnsupportedError("Choose another type.")])
def test_whatever_a_library_raises_a_full_disk_is_what_is_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], error: Exception
) -> None:
    output = tmp_path / "model"
    with largest_file(TOO_LITTLE):
        status = written(lambda: write_half(output, error), output)
    assert status == 1
    assert f"there is no space for it in {tmp_path} (File too large)" in capfd.readouterr().err


@pytest.mark.usefixtures("forked_children")
@pytest.mark.slow
@pytest.mark.usefixtures("one_converter")
@pytest.mark.parametrize(("engine", "convert"), PLAIN)
def test_a_converter_says_that_the_disk_is_full_and_leaves_nothing(
    kept: Path, tmp_path: Path, engine: str, convert: Convert
) -> None:
    with (
        largest_file(TOO_LITTLE),
        pytest.raises(OptiGPUError, match=NO_SPACE.format(engine=engine)),
    ):
        convert(tmp_path)
    assert models_in(kept / engine) == []


@pytest.mark.usefixtures("forked_children")
@pytest.mark.slow
@pytest.mark.usefixtures("one_converter")
@pytest.mark.parametrize(("engine", "before", "convert"), QUANTIZED)
def test_so_does_what_quantizes_a_model_that_is_there(
    kept: Path, tmp_path: Path, engine: str, before: Convert, convert: Convert
) -> None:
    before(tmp_path)
    there = models_in(kept / engine)
    with (
        largest_file(TOO_LITTLE),
        pytest.raises(OptiGPUError, match=NO_SPACE.format(engine=engine)),
    ):
        convert(tmp_path)
    assert models_in(kept / engine) == there
    convert(tmp_path)


@pytest.mark.usefixtures("forked_children")
@pytest.mark.long
@pytest.mark.onnxruntime
@pytest.mark.openvino
def test_the_variants_that_need_no_converter_are_measured_beside_those_that_fail(
    kept: Path, tmp_path: Path
) -> None:
    """Each converter is a process of its own."""
    engines = ("onnxruntime", "openvino")
    spec = brief_job(model=SMALL, beside=[{"backend": engine} for engine in engines])
    with largest_file(TOO_LITTLE):
        report = measured(spec, tmp_path / "locks")
    torch, *others = report.outcomes
    assert torch.status is VariantStatus.SUCCEEDED
    for engine, outcome in zip(engines, others, strict=True):
        assert_says_no_space(outcome, kept / engine)
        assert models_in(kept / engine) == []


def assert_says_no_space(outcome: Outcome, folder: Path) -> None:
    assert outcome.status is VariantStatus.FAILED
    assert f"there is no space for it in {folder} (" in str(outcome.reason)
