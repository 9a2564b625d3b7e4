"""vLLM in an environment of its own: tokens and logits as transformers has them, and a job beside torch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optigpu.backends import BACKENDS
from optigpu.backends.vllm.settings import EngineSettings, cache_gib, settings_of
from optigpu.documents.result import Result, VerdictReason
from optigpu.documents.shapes import ModelFacts
from optigpu.hardware import probe
from optigpu.job.spec import JobSpec
from optigpu.measure import run
from optigpu.models.facts import facts_of
from optigpu.models.reference import parse_reference
from optigpu.techniques.quantization.vllm_bf16 import VllmBf16
from optigpu.vocabulary import DeviceKind, UnsupportedError
from optigpu.workloads.generate import Generate
from tests.engine.caches import BUILDS, CONVERTED, OPERATORS, PEAKS, cache_with
from tests.engine.converted_engines import TINY, ordered
from tests.engine.own_environments import PREFILL, Answers, answers_of, expected_logits, expected_tokens

BACKEND = BACKENDS["vllm"]
STARTS_SLOWLY = pytest.mark.timeout(1800)
"""It compiles the model each time that it starts."""


def facts(model: str = TINY) -> ModelFacts:
    found = facts_of(parse_reference(model))
    assert found is not None
    return found


def settings(stack: tuple[VllmBf16, ...] = (), **shape: int) -> EngineSettings:
    workload = Generate.model_validate({"kind": "generate"} | shape)
    order = ordered(Path("/nowhere"), *stack, workload=workload, seed=7)
    return settings_of(order, Path("/models/tiny"), facts())


def test_the_engine_has_room_for_the_workload_and_keeps_nothing_between_prompts() -> None:
    found = settings(prompt_tokens=24, new_tokens=40, batch_size=2).keywords
    assert found == {
        "model": "/models/tiny",
        "dtype": "float32",
        "max_model_len": 65,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 130,
        "seed": 7,
        "kv_cache_dtype": "auto",
        "enable_prefix_caching": False,
        "async_scheduling": False,
        "skip_tokenizer_init": True,
        "load_format": "safetensors",
        "generation_config": "vllm",
        "disable_log_stats": True,
    }
    assert settings((VllmBf16(),)).dtype == "bfloat16"
    longest = facts().longest
    assert settings(prompt_tokens=longest - 2, new_tokens=2).max_model_len == longest


def test_the_cache_takes_whole_gibibytes() -> None:
    assert cache_gib(settings(), facts()) == 1
    llama = facts("preset:llama-3.2-1b")
    large = EngineSettings("m", "float32", 8192, 8, 65536, 0)
    assert cache_gib(large, llama) == 1 + 8 * 8192 * 2 * 16 * 8 * 64 * 4 // 2**30


def test_it_generates_alone_and_greedily() -> None:
    assert BACKEND.supports(Generate(), None) is None
    assert "leave prompt" in str(BACKEND.supports(Generate(temperature=1), None))
    with pytest.raises(UnsupportedError, match="those of torch"):
        BACKEND.peaks(DeviceKind.CPU, 1)


def test_without_its_environment_it_says_how_to_make_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "optigpu engines install vllm" in str(BACKEND.missing(probe()))


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return answers_of("vllm", TINY, tmp_path_factory.mktemp("vllm"))


@pytest.mark.slow
@pytest.mark.vllm
@STARTS_SLOWLY
def test_greedy_tokens_are_transformers_tokens(answers: Answers) -> None:
    assert answers.tokens == answers.again == expected_tokens(TINY)
    assert len(answers.gaps_s) == len(answers.tokens[0])
    assert min(answers.gaps_s) > 0


@pytest.mark.slow
@pytest.mark.vllm
@STARTS_SLOWLY
def test_logits_of_its_own_steps_are_transformers_logits(answers: Answers) -> None:
    expected = expected_logits(TINY)
    bound = 1e-4 * np.abs(expected).max()
    assert np.abs(answers.logits - expected[:, PREFILL:]).max() < bound
    assert np.abs(answers.from_nothing - expected[:, :6]).max() < bound
    assert np.abs(answers.last - expected[:, -1]).max() < bound


@pytest.mark.slow
@pytest.mark.vllm
@STARTS_SLOWLY
def test_its_facts_say_how_it_ran(answers: Answers) -> None:
    assert answers.facts.dtype == answers.facts.kv_cache_dtype == "float32"
    assert answers.facts.versions["vllm"]
    assert answers.facts.threads == 1
    assert "does not say" in answers.facts.why_null("footprint")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    measure = {"replicates": 1, "min_seconds": 0.01, "max_seconds": 1, "quality": {"tokens": 100}}
    measure["meters"] = ["latency", "memory", "quality"]
    document: dict[str, Any] = {
        "workload": {"kind": "generate", "prompt_tokens": 8, "new_tokens": 16},
        "model": TINY,
        "measure": measure,
        "beside": [{"backend": "vllm", "stack": [{"name": "vllm_bf16"}], "label": "bf16"}],
        "limits": {"wait_for_quiet_s": 0, "timeout_s": 1500},
    }
    with pytest.MonkeyPatch.context() as patch:
        folder = cache_with(tmp_path_factory.mktemp("vllm"), BUILDS, OPERATORS, PEAKS, CONVERTED, "engines")
        patch.setenv("XDG_CACHE_HOME", str(folder.parent))
        patch.setenv("OPTIGPU_DATA_DIR", str(tmp_path_factory.mktemp("data")))
        locks = tmp_path_factory.mktemp("locks")
        report = run(JobSpec.model_validate(document), lambda _: None, lock_dir=locks, threads=1)
    assert [outcome.reason for outcome in report.outcomes] == [None] * 2
    return {result.variant.label: result for result in report.results}


@pytest.mark.slow
@pytest.mark.vllm
@STARTS_SLOWLY
def test_a_job_measures_it_beside_torch(results: dict[str, Result]) -> None:
    bf16 = results["bf16"]
    assert VerdictReason.OUTPUT_INVALID not in bf16.verdict.reasons
    assert bf16.facts.dtype == "bfloat16"
    assert bf16.environment.software["transformers"] != ""
    values = {name: bf16.metrics[name].value for name in ("tokens_per_s", "ttft_s", "kld_mean")}
    assert all(value is not None and value > 0 for value in values.values())
    assert (values["kld_mean"] or 1) < 0.01
    assert bf16.variant.workload_digest == results["baseline"].variant.workload_digest
