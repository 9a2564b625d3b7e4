"""Engines that most machines do not have: what they are told, what they answer, and why they are not here."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from shutil import copytree
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from optigpu.backends import BACKENDS
from optigpu.backends.base import Order
from optigpu.backends.coreml import logits_in
from optigpu.backends.export import folder_of
from optigpu.backends.vllm import EngineSettings, settings_of
from optigpu.documents.facts import ModelFacts, RunFacts
from optigpu.documents.result import Accelerator, Environment, Result, VerdictReason
from optigpu.engines.environments import environment_of, variables_of
from optigpu.hardware import probe
from optigpu.models.described import facts_of
from optigpu.models.loading.load import load_model
from optigpu.models.reference import BUNDLED, parse_reference
from optigpu.selftest.checks import engine_checks, run_engine
from optigpu.selftest.setting import Setting
from optigpu.techniques.base import EXACT, Technique
from optigpu.techniques.quantization.vllm_bf16 import VllmBf16
from optigpu.vocabulary import DeviceKind, OptiGPUError, UnsupportedError, VariantStatus
from optigpu.workloads.generate import Generate
from tests.engine.caches import BUILDS, CONVERTED, OPERATORS, PEAKS, cache_with, own_folders
from tests.engine.converted_engines import TINY, ordered, prompts, transformers_tokens
from tests.engine.machines import here
from tests.engine.sessions import AT_ONCE, brief_job, by_label, measured, quick_job

if TYPE_CHECKING:
    from transformers import PreTrainedModel


ROOT = Path(__file__).resolve().parents[2]
PROMPTS, NEW, PREFILL = np.random.default_rng(5).integers(2048, size=(2, 24)), 40, 8
"""Random tokens of bundled:tiny."""
SCORED = np.random.default_rng(6).integers(2048, size=(2, 32))


@dataclass(frozen=True)
class Answers:
    """Greedy tokens after PROMPTS, twice, with their gaps; logits of SCORED after each token from PREFILL on."""

    tokens: list[list[int]]
    again: list[list[int]]
    gaps_s: list[float]
    facts: RunFacts
    logits: NDArray[np.float32]
    from_nothing: NDArray[np.float32]
    last: NDArray[np.float32]


def answers_of(backend: str, model: str, folder: Path) -> Answers:
    """Starts a process with the interpreter of the backend's environment."""
    environment = environment_of(backend)
    assert environment is not None
    asked = {
        "backend": backend,
        "model": model,
        "prompts": PROMPTS.tolist(),
        "new_tokens": NEW,
        "scored": SCORED.tolist(),
        "prefill": PREFILL,
        "folder": str(folder),
    }
    done = subprocess.run(
        [str(environment.python), str(ROOT / "tests" / "engine" / "children" / "engine_answers.py")],
        input=json.dumps(asked),
        env=os.environ | variables_of(backend) | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.strip().splitlines()[-1])
    with np.load(folder / "logits.npz") as kept:
        logits = {name: kept[name] for name in ("logits", "from_nothing", "last")}
    return Answers(**said | {"facts": RunFacts.model_validate(said["facts"])}, **logits)


def expected_tokens(model: str) -> list[list[int]]:
    """What transformers decodes greedily."""
    found = _loaded(model).generate(torch.from_numpy(PROMPTS), max_new_tokens=NEW, do_sample=False)  # type: ignore[operator]
    tokens: list[list[int]] = found[:, PROMPTS.shape[1] :].tolist()
    return tokens


def expected_logits(model: str) -> NDArray[np.float32]:
    """What transformers has after each token of SCORED."""
    with torch.no_grad():
        found: NDArray[np.float32] = _loaded(model)(input_ids=torch.from_numpy(SCORED)).logits.numpy()
    return found


def _loaded(model: str) -> "PreTrainedModel":
    return load_model(parse_reference(model), device="cpu", dtype="float32")


ABSENT = {
    "coreml": "coreml runs on macOS alone, and this is Linux",
    **{name: f"optigpu engines install {name}" for name in ("ik_llama_cpp", "vllm")},
}
"""On a Linux machine with an empty cache folder, and what a job says of each."""


def order(stack: tuple[Technique, ...] = (), model: str = TINY) -> Order:
    workload = Generate(prompt_tokens=24, new_tokens=40, batch_size=2)
    return ordered(Path("/nowhere"), *stack, model=model, workload=workload, seed=3, threads=2)


def with_gpu(*packages: str) -> Environment:
    gpu = Accelerator(name="NVIDIA H100", memory_bytes=80 * 2**30, uuid="GPU-0")
    software = dict.fromkeys(packages, "1.0")
    return probe().model_copy(update={"accelerators": (gpu,), "software": software})


def without_gpu(*packages: str) -> Environment:
    software = dict.fromkeys(packages, "1.0")
    return probe().model_copy(update={"accelerators": (), "software": software})


def test_tensorrt_llm_says_what_it_lacks() -> None:
    missing = BACKENDS["tensorrt_llm"].missing
    assert "needs an NVIDIA GPU" in str(missing(without_gpu("tensorrt-llm")))
    assert "pip install tensorrt-llm" in str(missing(with_gpu()))
    assert missing(with_gpu("tensorrt-llm")) is None


def test_coreml_s_answer_holds_the_logits_of_each_token() -> None:
    logits = np.arange(2 * 4 * 3, dtype=np.float16).reshape(2, 4, 3)
    found = logits_in({"logits": logits}, 2)
    assert found.dtype == np.float32
    assert found.tolist() == [[6, 7, 8], [18, 19, 20]]
    with pytest.raises(OptiGPUError, match="answered with other instead of logits"):
        logits_in({"other": logits}, 0)


def test_a_trained_model_s_own_folder_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert folder_of("vllm", order(), lambda _: None) == BUNDLED["tiny"]
    copytree(BUNDLED["tiny"], tmp_path / "mine")
    monkeypatch.setenv("OPTIGPU_MODELS_DIR", str(tmp_path))
    assert folder_of("vllm", order(model="path:mine"), lambda _: None) == tmp_path / "mine"
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UnsupportedError, match="does not hold hub:nobody/nothing"):
        folder_of("vllm", order(model="hub:nobody/nothing"), lambda _: None)


@pytest.mark.long
def test_engines_that_are_not_here_leave_the_others_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_with(tmp_path, BUILDS, OPERATORS, PEAKS).parent))
    monkeypatch.setenv("OPTIGPU_DATA_DIR", str(tmp_path / "data"))
    spec = brief_job(model="preset:tiny-llama-test", beside=[{"backend": name} for name in ABSENT])
    report = measured(spec, tmp_path / "locks")
    torch, *others = report.outcomes
    assert torch.status is VariantStatus.SUCCEEDED
    assert [outcome.status for outcome in others] == [VariantStatus.UNSUPPORTED] * len(ABSENT)
    for words, outcome in zip(ABSENT.values(), others, strict=True):
        assert words in str(outcome.reason)


LENGTH, STEPS, ROWS = 12, 9, 2
BRIEF_WORKLOAD = Generate(prompt_tokens=LENGTH, new_tokens=STEPS, batch_size=ROWS)
MODULES_REPLACED = ("tensorrt_llm", "optigpu.backends.tensorrt_llm.runtime")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The stand-in, imported in the place of the library."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "stand_in"))
    before = {name: sys.modules.pop(name) for name in MODULES_REPLACED if name in sys.modules}
    import tensorrt_llm

    yield tensorrt_llm
    for name in MODULES_REPLACED:
        sys.modules.pop(name, None)
    sys.modules.update(before)


def tensorrt_llm_runtime(folder: Path, model: str = TINY) -> Any:
    return BACKENDS["tensorrt_llm"].prepare(
        ordered(folder, model=model, workload=BRIEF_WORKLOAD), lambda _: None
    )


@pytest.mark.usefixtures("library")
@pytest.mark.slow
def test_tensorrt_llm_s_greedy_tokens_are_transformers_tokens(tmp_path: Path) -> None:
    engine = tensorrt_llm_runtime(tmp_path)
    prompt = prompts(ROWS, LENGTH)
    for _ in range(2):
        found = engine.generate(prompt, STEPS)
        assert found.tokens.tolist() == transformers_tokens(TINY, prompt, STEPS)
        assert len(found.gaps_s) == STEPS
        assert min(found.gaps_s) > 0
    assert engine.decoded == (ROWS, LENGTH + STEPS)


@pytest.mark.usefixtures("library")
def test_it_is_told_of_the_workload_and_of_no_tokenizer(tmp_path: Path, library: Any) -> None:
    facts = tensorrt_llm_runtime(tmp_path).notes.facts
    told = library.ARGUMENTS
    assert (told["max_batch_size"], told["max_seq_len"], told["dtype"]) == (ROWS, LENGTH + STEPS, "float32")
    assert told["skip_tokenizer_init"] is True
    assert (facts["dtype"], facts["kv_cache"]) == ("float32", "paged")
    assert facts["versions"] == {"tensorrt-llm": library.__version__}


@pytest.mark.usefixtures("library")
@pytest.mark.slow
def test_the_self_test_compares_its_tokens_with_torch_s(tmp_path: Path) -> None:
    (check,) = (each for each in engine_checks() if each.name == "tensorrt_llm")
    assert check.device is DeviceKind.CUDA
    found = run_engine(check, Setting(here(), DeviceKind.CUDA, 1, tmp_path))
    assert (found.how, found.error <= EXACT) == (TINY, True)


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


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return answers_of("vllm", TINY, tmp_path_factory.mktemp("vllm"))


@pytest.mark.slow
@pytest.mark.vllm
@STARTS_SLOWLY
def test_vllm_s_greedy_tokens_are_transformers_tokens(answers: Answers) -> None:
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


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    beside = [{"backend": "vllm", "stack": [{"name": "vllm_bf16"}], "label": "bf16"}]
    spec = quick_job(beside=beside, limits=AT_ONCE | {"timeout_s": 1500})
    made, locks = tmp_path_factory.mktemp("vllm"), tmp_path_factory.mktemp("locks")
    with own_folders(made, BUILDS, OPERATORS, PEAKS, CONVERTED, "engines"):
        return by_label(measured(spec, locks))


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


def test_a_folder_that_cannot_be_written_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = cache_with(tmp_path)
    (cache / CONVERTED).write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent))
    with pytest.raises(OptiGPUError) as raised:
        folder_of("vllm", ordered(tmp_path, model="preset:tiny-llama-test"), lambda _: None)
    assert str(raised.value) == (
        f"Converted models cannot be kept in {cache / CONVERTED / 'vllm'} (Not a directory); give the right to write "
        "there, name another folder in XDG_CACHE_HOME, or set OPTIGPU_CONVERTED_CACHE_GB=0 to keep none."
    )
