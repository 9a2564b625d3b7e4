"""llama.cpp and ik_llama.cpp: jobs from the request to the results, types, and what they refuse."""

import hashlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from optigpu.backends.ik_llama_cpp.engine import FILE_TYPES
from optigpu.conductor.processes.confinement import child_variables
from optigpu.documents.facts import TextQuality
from optigpu.documents.result import Result
from optigpu.engines.environments import environment_of
from optigpu.measure import Report
from optigpu.models.held import MODELS_DIR
from optigpu.models.loading.load import load_model
from optigpu.models.reference import BUNDLED, parse_reference
from optigpu.paths import cache_dir
from optigpu.vocabulary import VariantStatus
from tests.engine.caches import BUILDS, CONVERTED, OPERATORS, PEAKS, cache_with, own_folders
from tests.engine.converted_engines import loaded_by_measuring, prepared
from tests.engine.sessions import assert_measured, brief_job, by_label, measured, quick_job, value

pytestmark = pytest.mark.usefixtures("forked_children")

TYPES = ("F16", "Q8_0", "Q4_0")
WEIGHTS = hashlib.sha256((BUNDLED["tiny"] / "model.safetensors").read_bytes()).hexdigest()


def gguf(kind: str) -> list[dict[str, str]]:
    return [{"name": "gguf", "type": kind}]


@pytest.fixture(scope="module", autouse=True)
def _folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with own_folders(tmp_path_factory.mktemp("llama"), BUILDS, OPERATORS, PEAKS, CONVERTED, "engines"):
        yield


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """torch's baseline with llama.cpp's, and with files of three types, beside it."""
    beside: list[dict[str, Any]] = [{"backend": "llama_cpp"}]
    beside += [{"backend": "llama_cpp", "stack": gguf(kind), "label": kind} for kind in TYPES]
    return measured(quick_job(beside=beside), tmp_path_factory.mktemp("locks"))


@pytest.fixture(scope="module")
def results(report: Report) -> dict[str, Result]:
    return by_label(report)


@pytest.mark.slow
@pytest.mark.llama
def test_engines_are_measured_side_by_side_and_compare(report: Report, results: dict[str, Result]) -> None:
    assert list(results) == ["baseline", "llama_cpp: baseline", *TYPES]
    assert {result.variant.backend for result in results.values()} == {"torch", "llama_cpp"}
    assert all(result.facts.side_by_side == (0, 1, 2, 3, 4) for result in results.values())
    assert len({result.variant.workload_digest for result in results.values()}) == 1
    assert len({result.variant.variant_digest for result in results.values()}) == 5
    assert [row.label for row in report.attribution.rows] == list(results)


@pytest.mark.slow
@pytest.mark.llama
def test_its_results_are_whole(results: dict[str, Result]) -> None:
    for result in results.values():
        assert_measured(result)
        weights = result.facts.weights
        assert weights is not None
        assert (weights.hash, weights.hash_of) == (WEIGHTS, "files")
        assert result.provenance is not None
        assert result.provenance.weight_hash == WEIGHTS
        assert result.metrics["peak_bytes"].value is None
        assert result.metrics["peak_bytes"].reason
    four = results["Q4_0"].facts
    assert four.recorded["gguf_type"] == "Q4_0"
    assert four.versions["llama-cpp-python"]
    assert four.attention_kernels is None
    assert "llama.cpp" in four.why_null("attention_kernels")
    assert four.footprint is not None


@pytest.mark.slow
@pytest.mark.llama
def test_fewer_bits_are_further_from_fp32(results: dict[str, Result]) -> None:
    losses = [value(results[name], "kld_mean") for name in ("llama_cpp: baseline", *TYPES)]
    assert losses == sorted(losses)
    assert losses[0] < 1e-7
    assert losses[1] < 1e-4 < losses[3]
    assert losses[2] < losses[3] / 3
    assert value(results["llama_cpp: baseline"], "top1_agreement") == 1
    texts = [result.facts.quality for result in results.values()]
    assert all(isinstance(text, TextQuality) for text in texts)
    assert len({text.tokens_sha256 for text in texts if isinstance(text, TextQuality)}) == 1


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.llama
def test_a_kept_file_that_the_engine_aborts_on_is_written_anew_by_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no blocks it passes all checks of the header, and llama.cpp ends its process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_with(tmp_path, BUILDS, OPERATORS, PEAKS).parent))
    prepared("llama_cpp", tmp_path, model="preset:tiny-llama-test")
    (kept,) = (cache_dir() / "converted" / "gguf").glob("preset-tiny-llama-test-*-F32.gguf")
    whole = kept.read_bytes()
    count = whole.index(b"llama.block_count") + len(b"llama.block_count") + 4
    kept.write_bytes(whole[:count] + bytes(4) + whole[count + 4 :])
    spec = brief_job(backend="llama_cpp", model="preset:tiny-llama-test")
    (damaged,) = measured(spec, tmp_path / "locks").outcomes
    assert damaged.status is VariantStatus.FAILED
    said = f"The engine crashed on {kept.name}, a kept conversion that may be damaged. It has been removed; run the job"
    assert str(damaged.reason).startswith(f"{said} again. The measuring process was killed by signal 6")
    assert "GGML_ASSERT" in str(damaged.reason)
    assert "ggml_print_backtrace" not in str(damaged.reason)
    (again,) = measured(spec, tmp_path / "locks").outcomes
    assert again.status is VariantStatus.SUCCEEDED
    assert kept.read_bytes() == whole


@pytest.mark.slow
@pytest.mark.llama
def test_its_measuring_process_loads_no_torch(report: Report, tmp_path: Path) -> None:
    """The file is kept already; writing one is another process's affair."""
    assert loaded_by_measuring("llama_cpp", tmp_path, "torch", "transformers") == "[]"


LLAMA, WIDE = "preset:tiny-llama-test", "path:wide"
PROMPT, NEW = 24, 40
PROGRAM = """
import json, sys, tempfile
from pathlib import Path
import numpy as np
from optigpu.backends import BACKENDS
from optigpu.backends.base import Order
from optigpu.hardware import probe
from optigpu.techniques import TECHNIQUES
from optigpu.vocabulary import DeviceKind, UnsupportedError
from optigpu.workloads.generate import Generate

for line in sys.stdin:
    asked = json.loads(line)
    stack = tuple(TECHNIQUES[each["name"]].model_validate(each) for each in asked["stack"])
    order = Order(asked["model"], stack, Generate(), DeviceKind.CPU, 0, 1, Path(tempfile.mkdtemp()), probe())
    try:
        runtime = BACKENDS["ik_llama_cpp"].prepare(order, lambda _: None)
        prompt = np.random.default_rng(5).integers(512, size=(asked["rows"], 24))
        tokens = runtime.generate(prompt, 40).tokens
    except UnsupportedError as error:
        print(json.dumps({"refused": str(error)}), flush=True)
        continue
    scored = np.concatenate(list(runtime.score(prompt, 8)))
    facts = runtime.notes.facts
    print(json.dumps({
        "tokens": tokens.tolist(), "logits": scored.tolist(), "types": facts["gguf_tensor_types"],
        "flags": facts["ik_llama_cpp_flags"], "bytes": runtime.weights().bytes, "versions": facts["versions"],
    }), flush=True)
"""


class Told(TypedDict, total=False):
    """What the program in the engine's environment answers."""

    refused: str
    tokens: list[list[int]]
    logits: list[list[float]]
    types: dict[str, int]
    flags: str
    bytes: int
    versions: dict[str, str]


@pytest.fixture(scope="module")
def ik_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    made = tmp_path_factory.mktemp("ik")
    with (
        own_folders(made, CONVERTED, BUILDS, OPERATORS, PEAKS, "engines"),
        pytest.MonkeyPatch.context() as patch,
    ):
        models = tmp_path_factory.mktemp("models")
        patch.setenv(MODELS_DIR, str(models))
        write_wide(models / "wide")
        yield


def write_wide(folder: Path) -> None:
    """A Llama whose rows are whole blocks of every type."""
    config = AutoConfig.for_model(
        "llama", vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.1, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def asked(*stack: dict[str, object], model: str = WIDE, rows: int = 1) -> Told:
    """One answer of a process in the engine's environment."""
    environment = environment_of("ik_llama_cpp")
    assert environment is not None
    line = json.dumps({"model": model, "rows": rows, "stack": stack})
    done = subprocess.run(
        [str(environment.python), "-P", "-c", PROGRAM],
        input=line,
        capture_output=True,
        text=True,
        env=child_variables(1),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    told: Told = json.loads(done.stdout.strip().splitlines()[-1])
    return told


def of_type(kind: str, **more: object) -> dict[str, object]:
    return {"name": "gguf", "type": kind, **more}


def error_of(told: Told, exact: Told) -> float:
    found, expected = np.array(told["logits"]), np.array(exact["logits"])
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.fixture(scope="module")
def exact() -> Told:
    return asked()


@pytest.mark.slow
@pytest.mark.usefixtures("ik_folders")
@pytest.mark.ik
def test_greedy_tokens_are_torch_s() -> None:
    model: Any = load_model(parse_reference(WIDE), device="cpu", dtype="float32")
    prompt = torch.from_numpy(np.random.default_rng(5).integers(512, size=(2, PROMPT)))
    expected = model.generate(prompt, max_new_tokens=NEW, do_sample=False)[:, PROMPT:]
    assert asked(rows=2)["tokens"] == expected.tolist()


@pytest.mark.usefixtures("ik_folders")
@pytest.mark.ik
@pytest.mark.slow
@pytest.mark.parametrize("kind", FILE_TYPES)
def test_every_type_is_written_and_read(exact: Told, kind: str) -> None:
    told = asked(of_type(kind, pure=True)) if kind != "F32" else exact
    assert "refused" not in told
    assert (error_of(told, exact) > 0) == (kind != "F32")
    assert error_of(told, exact) < 2, "random weights lose much in few bits; a wrong layout is far above"


@pytest.mark.slow
@pytest.mark.usefixtures("ik_folders")
@pytest.mark.ik
def test_its_settings_compute_the_same(exact: Told) -> None:
    fused = asked({"name": "llama_flash_attention"}, {"name": "llama_prompt_batch", "tokens": 8})
    assert error_of(fused, exact) < 1e-2
    refused = asked({"name": "llama_flash_attention"}, rows=2)["refused"]
    assert "several sequences are decoded together" in refused
    eight = asked({"name": "llama_kv_cache"})
    assert 0 < error_of(eight, exact) < 0.1


@pytest.mark.slow
@pytest.mark.usefixtures("ik_folders")
@pytest.mark.ik
def test_rows_that_are_no_whole_blocks_are_refused_and_end_no_process() -> None:
    refused = asked(of_type("IQ4_KS", pure=True), model=LLAMA)["refused"]
    assert "IQ4_KS keeps rows in blocks of 256 numbers" in refused
    assert "has rows of 128; leave pure out" in refused
    assert "refused" not in asked(of_type("IQ4_KS"), model=LLAMA)


@pytest.mark.slow
@pytest.mark.usefixtures("ik_folders")
@pytest.mark.ik
def test_gpt2_is_refused_and_ends_no_process() -> None:
    assert "ends on an assertion" in asked(model="bundled:tiny")["refused"]


@pytest.mark.slow
@pytest.mark.usefixtures("ik_folders")
@pytest.mark.ik
def test_a_job_has_its_versions_and_what_its_library_was_built_with(tmp_path: Path) -> None:
    stack = [of_type("IQ4_K", pure=True)]
    report = measured(brief_job(model=WIDE, backend="ik_llama_cpp", stack=stack), tmp_path)
    assert [outcome.status for outcome in report.outcomes] == [VariantStatus.SUCCEEDED]
    (result,) = report.results
    assert result.environment.software["ik-llama-cpp-python"] == result.facts.versions["ik-llama-cpp-python"]
    (build,) = result.facts.builds
    assert build.package == "ik-llama-cpp-python"
    assert build.instructions is not None
