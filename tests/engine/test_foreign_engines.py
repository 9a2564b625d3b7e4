"""Engines that this project has not run: what they are told, what they answer, and why they are not here."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest

from optigpu.backends import BACKENDS
from optigpu.backends.base import Order
from optigpu.backends.coreml.package import logits_in
from optigpu.backends.folders import folder_of
from optigpu.backends.serving import Arrivals
from optigpu.backends.tensorrt_llm.settings import arrived, sampling_of, settings_of
from optigpu.documents.result import Accelerator, Environment
from optigpu.hardware import probe
from optigpu.job.spec import JobSpec
from optigpu.measure import run
from optigpu.models.facts import facts_of
from optigpu.models.reference import BUNDLED, parse_reference
from optigpu.techniques.base import Technique
from optigpu.techniques.quantization.vllm_bf16 import VllmBf16
from optigpu.vocabulary import OptiGPUError, UnsupportedError, VariantStatus
from optigpu.workloads.generate import Generate
from optigpu.workloads.quality import Quality
from tests.engine.caches import BUILDS, OPERATORS, PEAKS, cache_with
from tests.engine.converted_engines import TINY, ordered

NAMES = ("tensorrt_llm", "coreml")
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


def test_coreml_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = BACKENDS["coreml"].missing
    monkeypatch.setattr("platform.system", lambda: "Linux")
    assert "runs on macOS alone, and this is Linux" in str(missing(without_gpu("coremltools")))
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    assert 'pip install -e ".[coreml]"' in str(missing(without_gpu()))
    assert missing(without_gpu("coremltools")) is None


@pytest.mark.parametrize("name", NAMES)
def test_they_decode_greedily_and_have_no_operators(name: str) -> None:
    backend = BACKENDS[name]
    assert backend.supports(Generate(), None) is None
    assert "leave prompt" in str(backend.supports(Generate(temperature=1), None))
    assert (backend.supports(Quality(), None) is None) is (name != "tensorrt_llm")
    with pytest.raises(UnsupportedError, match="no operators"):
        backend.peaks(backend.devices[0], 1)


def test_tensorrt_llm_is_told_of_one_workload() -> None:
    facts = facts_of(parse_reference(TINY))
    assert facts is not None
    assert settings_of(order((VllmBf16(),)), Path("/models/tiny"), facts).keywords == {
        "model": "/models/tiny",
        "dtype": "bfloat16",
        "max_batch_size": 2,
        "max_seq_len": 64,
        "max_num_tokens": 128,
        "skip_tokenizer_init": True,
        "kv_cache_config": {"enable_block_reuse": False},
    }
    assert settings_of(order(), Path("/models/tiny"), facts).dtype == "float32"
    assert sampling_of(40)["ignore_eos"] is True


@dataclass(frozen=True)
class Recorded:
    """A completion as it was at one moment."""

    token_ids: Sequence[int]


@dataclass(frozen=True)
class RecordedOutput:
    """A request as it was at one moment."""

    outputs: Sequence[Recorded]


async def recorded(*moments: Sequence[int]) -> AsyncIterator[RecordedOutput]:
    for token_ids in moments:
        await asyncio.sleep(0)
        yield RecordedOutput([Recorded(token_ids)])


def test_tensorrt_llm_s_answers_hold_all_tokens_so_far() -> None:
    ticks = count(1_000_000_000, 1_000_000_000)
    arrivals = Arrivals(2, 0)
    streams = [recorded([5], [5, 6], [5, 6, 7]), recorded([1], [1, 2], [1, 2, 3])]
    asyncio.run(arrived(streams, arrivals, lambda: next(ticks)))
    found = arrivals.generation(3, "TensorRT-LLM")
    assert found.tokens.tolist() == [[5, 6, 7], [1, 2, 3]]
    assert found.gaps_s == [2.0, 2.0, 2.0]


def test_a_sequence_that_ends_early_is_no_generation() -> None:
    arrivals = Arrivals(1, 0)
    asyncio.run(arrived([recorded([5], [5, 6])], arrivals, lambda: 1))
    with pytest.raises(OptiGPUError, match="decoded 2 tokens instead of the 3"):
        arrivals.generation(3, "TensorRT-LLM")


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
def test_a_preset_s_folder_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    said: list[str] = []
    preset = order(model="preset:tiny-llama-test")
    folder = folder_of("vllm", preset, said.append)
    assert {"config.json", "model.safetensors"} <= {path.name for path in folder.iterdir()}
    assert folder_of("vllm", preset, said.append) == folder
    assert said == ["writing the model's folder"]


@pytest.mark.long
def test_engines_that_are_not_here_leave_the_others_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_with(tmp_path, BUILDS, OPERATORS, PEAKS).parent))
    monkeypatch.setenv("OPTIGPU_DATA_DIR", str(tmp_path / "data"))
    document = {
        "workload": {"kind": "generate", "prompt_tokens": 8, "new_tokens": 8},
        "model": "preset:tiny-llama-test",
        "beside": [{"backend": name} for name in ABSENT],
        "measure": {"replicates": 1, "min_seconds": 0.01, "max_seconds": 0.5, "meters": ["latency"]},
        "limits": {"wait_for_quiet_s": 0},
    }
    report = run(JobSpec.model_validate(document), lambda _: None, lock_dir=tmp_path / "locks", threads=1)
    torch, *others = report.outcomes
    assert torch.status is VariantStatus.SUCCEEDED
    assert [outcome.status for outcome in others] == [VariantStatus.UNSUPPORTED] * len(ABSENT)
    for words, outcome in zip(ABSENT.values(), others, strict=True):
        assert words in str(outcome.reason)
