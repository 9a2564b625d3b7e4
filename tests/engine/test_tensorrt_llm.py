"""The tensorrt_llm backend before a stand-in for its library: what that is told, and what comes of its answers."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from optigpu.backends import BACKENDS
from optigpu.backends.tensorrt_llm.settings import sampling_of
from optigpu.selftest.checks import engine_checks, run_engine
from optigpu.selftest.setting import Setting
from optigpu.techniques.base import EXACT
from optigpu.vocabulary import DeviceKind, UnsupportedError
from optigpu.workloads.generate import Generate
from tests.engine.converted_engines import TINY, ordered, prompts, transformers_tokens
from tests.engine.here import here

PROMPT, NEW, ROWS = 12, 9, 2
WORKLOAD = Generate(prompt_tokens=PROMPT, new_tokens=NEW, batch_size=ROWS)
NAMES = ("tensorrt_llm", "optigpu.backends.tensorrt_llm.runtime")


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The stand-in, imported in the place of the library."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "stand_in"))
    before = {name: sys.modules.pop(name) for name in NAMES if name in sys.modules}
    import tensorrt_llm

    yield tensorrt_llm
    for name in NAMES:
        sys.modules.pop(name, None)
    sys.modules.update(before)


def runtime(folder: Path, model: str = TINY) -> Any:
    return BACKENDS["tensorrt_llm"].prepare(ordered(folder, model=model, workload=WORKLOAD), lambda _: None)


@pytest.mark.slow
def test_greedy_tokens_are_transformers_tokens(tmp_path: Path) -> None:
    engine = runtime(tmp_path)
    prompt = prompts(ROWS, PROMPT)
    for _ in range(2):
        found = engine.generate(prompt, NEW)
        assert found.tokens.tolist() == transformers_tokens(TINY, prompt, NEW)
        assert len(found.gaps_s) == NEW
        assert min(found.gaps_s) > 0
    assert engine.decoded == (ROWS, PROMPT + NEW)


def test_it_is_told_of_the_workload_and_of_no_tokenizer(tmp_path: Path, library: Any) -> None:
    facts = runtime(tmp_path).notes.facts
    told = library.ARGUMENTS
    assert (told["max_batch_size"], told["max_seq_len"], told["dtype"]) == (ROWS, PROMPT + NEW, "float32")
    assert told["skip_tokenizer_init"] is True
    assert (facts["dtype"], facts["kv_cache"]) == ("float32", "paged")
    assert facts["versions"] == {"tensorrt-llm": library.__version__}
    library.SamplingParams(**sampling_of(NEW))


def test_quality_is_null_with_the_reason(tmp_path: Path) -> None:
    engine, tokens = runtime(tmp_path), prompts(1, PROMPT)
    for ask in (engine.logits, lambda ids: engine.score(ids, 1), lambda ids: engine.scoring_s(ids, 1)):
        with pytest.raises(UnsupportedError, match="asked for tokens alone here, so the quality"):
            ask(tokens)
    assert engine.footprint() is None
    assert set(engine.peak_memory(lambda: None).reasons) == {"peak_bytes", "peak_reserved_bytes"}


@pytest.mark.usefixtures("models_dir")
def test_a_model_that_it_does_not_know_is_unsupported(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"TensorRT-LLM cannot run path:opt: Unknown architecture"):
        runtime(tmp_path, "path:opt")


@pytest.mark.slow
def test_the_self_test_compares_its_tokens_with_torch_s(tmp_path: Path) -> None:
    (check,) = (each for each in engine_checks() if each.name == "tensorrt_llm")
    assert check.device is DeviceKind.CUDA
    found = run_engine(check, Setting(here(), DeviceKind.CUDA, 1, tmp_path))
    assert (found.how, found.error <= EXACT) == (TINY, True)
