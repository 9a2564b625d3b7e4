"""ik_llama.cpp in its own environment: torch's tokens in float32, its own types, and what it refuses."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import pytest

from optigpu.backends import BACKENDS
from optigpu.backends.ik_llama_cpp.structures import FILE_TYPES
from optigpu.conductor.processes.variables import child_variables
from optigpu.engines.environments import environment_of
from optigpu.hardware import probe
from optigpu.job.spec import JobSpec
from optigpu.measure import run
from optigpu.models.held import MODELS_DIR
from optigpu.vocabulary import VariantStatus
from tests.engine.caches import BUILDS, CONVERTED, OPERATORS, PEAKS, cache_with

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


@pytest.fixture(scope="module", autouse=True)
def _folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        folder = cache_with(tmp_path_factory.mktemp("ik"), CONVERTED, BUILDS, OPERATORS, PEAKS, "engines")
        patch.setenv("XDG_CACHE_HOME", str(folder.parent))
        patch.setenv("OPTIGPU_DATA_DIR", str(tmp_path_factory.mktemp("data")))
        models = tmp_path_factory.mktemp("models")
        patch.setenv(MODELS_DIR, str(models))
        write_wide(models / "wide")
        yield


def write_wide(folder: Path) -> None:
    """A Llama whose rows are whole blocks of every type."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

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


@pytest.mark.ik
def test_greedy_tokens_are_torch_s() -> None:
    import torch

    from optigpu.models.loading.load import load_model
    from optigpu.models.reference import parse_reference

    model: Any = load_model(parse_reference(WIDE), device="cpu", dtype="float32")
    prompt = torch.from_numpy(np.random.default_rng(5).integers(512, size=(2, PROMPT)))
    expected = model.generate(prompt, max_new_tokens=NEW, do_sample=False)[:, PROMPT:]
    assert asked(rows=2)["tokens"] == expected.tolist()


@pytest.mark.ik
@pytest.mark.slow
@pytest.mark.parametrize("kind", FILE_TYPES)
def test_every_type_is_written_and_read(exact: Told, kind: str) -> None:
    told = asked(of_type(kind, pure=True)) if kind != "F32" else exact
    assert "refused" not in told
    assert (error_of(told, exact) > 0) == (kind != "F32")
    assert error_of(told, exact) < 2, "random weights lose much in few bits; a wrong layout is far above"


@pytest.mark.ik
def test_a_pure_file_has_one_type_of_matrices(exact: Told) -> None:
    mixed, pure = (asked(of_type("Q4_0", pure=pure)) for pure in (False, True))
    assert set(pure["types"]) == {"F32", "Q4_0"}
    assert len(mixed["types"]) > 2
    assert pure["bytes"] < mixed["bytes"]


@pytest.mark.ik
def test_its_settings_compute_the_same(exact: Told) -> None:
    fused = asked({"name": "llama_flash_attention"}, {"name": "llama_prompt_batch", "tokens": 8})
    assert error_of(fused, exact) < 1e-2
    refused = asked({"name": "llama_flash_attention"}, rows=2)["refused"]
    assert "several sequences are decoded together" in refused
    eight = asked({"name": "llama_kv_cache"})
    assert 0 < error_of(eight, exact) < 0.1


@pytest.mark.ik
def test_rows_that_are_no_whole_blocks_are_refused_and_end_no_process() -> None:
    refused = asked(of_type("IQ4_KS", pure=True), model=LLAMA)["refused"]
    assert "IQ4_KS keeps rows in blocks of 256 numbers" in refused
    assert "has rows of 128; leave pure out" in refused
    assert "refused" not in asked(of_type("IQ4_KS"), model=LLAMA)


@pytest.mark.ik
def test_gpt2_is_refused_and_ends_no_process() -> None:
    assert "ends on an assertion" in asked(model="bundled:tiny")["refused"]


@pytest.mark.ik
def test_a_job_has_its_versions_and_what_its_library_was_built_with(tmp_path: Path) -> None:
    measure = {"replicates": 1, "min_seconds": 0.01, "max_seconds": 0.5, "meters": ["latency"]}
    document = {
        "workload": {"kind": "generate", "prompt_tokens": 4, "new_tokens": 4},
        "model": WIDE,
        "backend": "ik_llama_cpp",
        "stack": [of_type("IQ4_K", pure=True)],
        "measure": measure,
        "limits": {"wait_for_quiet_s": 0},
    }
    report = run(JobSpec.model_validate(document), lambda _: None, lock_dir=tmp_path, threads=1)
    assert [outcome.status for outcome in report.outcomes] == [VariantStatus.SUCCEEDED]
    (result,) = report.results
    assert result.environment.software["ik-llama-cpp-python"] == result.facts.versions["ik-llama-cpp-python"]
    (build,) = result.facts.builds
    assert build.package == "ik-llama-cpp-python"
    assert build.instructions is not None


def test_without_its_environment_it_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    reason = BACKENDS["ik_llama_cpp"].missing(probe())
    assert reason == (
        "ik_llama_cpp is not installed; install it with: optigpu engines install ik_llama_cpp (about 10 minutes)"
    )
    assert "engines" not in os.listdir(tmp_path)
