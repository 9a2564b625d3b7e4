"""Quality of servers by the log-probabilities that they return, beside that of the same model in this process."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch

from optigpu.backends.endpoint.prompts import tokenizer_of
from optigpu.documents.facts import TextQuality, ToldFacts
from optigpu.documents.result import Result
from optigpu.measure import Report
from optigpu.models.loading.load import load_model
from optigpu.models.reference import parse_reference
from tests.engine.caches import BUILDS, OPERATORS, PEAKS, own_folders
from tests.engine.sessions import by_label, measured, quick_job, value
from tests.servers.completions import serving
from tests.servers.telling import telling

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_children")]
TINY = "bundled:tiny"
TEXT = "file:text.txt"
WAYS = ("prompt_logprobs", "echo")
MOST = 20
VOCABULARY = 2048


class Model:
    """bundled:tiny in bfloat16, whose predictions differ from the fp32 model's."""

    def __init__(self) -> None:
        self._model = load_model(parse_reference(TINY), device="cpu", dtype="bfloat16")
        tokenizer = tokenizer_of(parse_reference(TINY))
        assert tokenizer is not None
        self.tokenizer = tokenizer

    def logits(self, prompt: Sequence[int]) -> np.ndarray:
        with torch.inference_mode():
            found = self._model(torch.tensor([list(prompt)])).logits[0]
        return np.asarray(found.float().numpy())

    def write(self, token: int) -> str:
        text: str = self.tokenizer.decode([token], skip_special_tokens=False)
        return text


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


MEASURE: dict[str, Any] = {
    "replicates": 1,
    "min_seconds": 0.01,
    "max_seconds": 1,
    "meters": ["latency", "quality"],
}
QUALITY = {"text": TEXT, "tokens": 240, "window": 24, "seconds": 600}


@pytest.fixture(scope="module", autouse=True)
def texts(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("texts")
    words = [model.write(int(token)) for token in np.random.default_rng(1).integers(300, 2000, size=400)]
    (folder / "text.txt").write_text("".join(words).replace("\ufffd", ""))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPTIGPU_DATASETS_DIR", str(folder))
        with own_folders(tmp_path_factory.mktemp("cache"), BUILDS, OPERATORS, PEAKS):
            yield


@pytest.fixture(scope="module")
def report(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Report]:
    """A job of a text: fp32, bfloat16 in this process, and the latter behind a server of each kind."""
    with ExitStack() as stack:
        beside: list[dict[str, Any]] = [{"stack": [{"name": "bf16"}], "label": "here"}]
        for name in WAYS:
            url = stack.enter_context(serving(telling(name, model.logits, model.write, MOST))).url
            beside.append({"backend": "endpoint", "endpoint": f"{url}#tiny", "label": name})
        spec = quick_job(beside=beside, measure=MEASURE | {"quality": QUALITY})
        yield measured(spec, tmp_path_factory.mktemp("locks"))


def told(result: Result) -> ToldFacts:
    assert isinstance(result.facts.quality, TextQuality)
    assert result.facts.quality.told is not None
    return result.facts.quality.told


@pytest.mark.parametrize("way", WAYS)
def test_what_a_server_tells_bounds_the_divergence_of_the_same_model_here(report: Report, way: str) -> None:
    results = by_label(report)
    here, served = results["here"], results[way]
    facts, true = told(served), value(here, "kld_mean")
    assert facts.kld_low <= true * 1.02 + 1e-5
    assert true <= facts.kld_high * 1.02 + 1e-5
    assert value(served, "kld_mean") == facts.kld_high
    assert (facts.tokens, facts.left_out) == (MOST, 0)
    assert abs(value(served, "top1_agreement") - value(here, "top1_agreement")) <= 0.02
    np.testing.assert_allclose(value(served, "perplexity"), value(here, "perplexity"), rtol=0.01)
    assert "written as those of the job's model" in facts.vocabulary


def test_all_tokens_tell_the_divergence_itself(
    model: Model, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with serving(telling("prompt_logprobs", model.logits, model.write, 10_000)) as server:
        beside = [{"backend": "endpoint", "endpoint": f"{server.url}#tiny", "label": "served"}]
        quality = QUALITY | {"tokens": 48, "probabilities": "all"}
        spec = quick_job(stack=[{"name": "bf16"}], beside=beside, measure=MEASURE | {"quality": quality})
        results = by_label(measured(spec, tmp_path_factory.mktemp("locks")))
    facts = told(results.pop("served"))
    (here,) = results.values()
    assert facts.tokens == VOCABULARY
    assert 0 < facts.kld_high - facts.kld_low <= 5e-5
    assert facts.kld_low - 1e-5 <= value(here, "kld_mean") * 1.02
    assert value(here, "kld_mean") <= facts.kld_high * 1.02 + 1e-5


def test_two_servers_of_one_model_agree_and_it_is_no_distance_from_fp32(
    model: Model, tmp_path_factory: pytest.TempPathFactory
) -> None:
    behaves = [telling(way, model.logits, model.write, MOST) for way in WAYS]
    with serving(behaves[0]) as ours, serving(behaves[1]) as theirs:
        quality = QUALITY | {"tokens": 48, "reference": f"{theirs.url}#tiny"}
        spec = quick_job(
            backend="endpoint", endpoint=f"{ours.url}#tiny", measure=MEASURE | {"quality": quality}
        )
        (result,) = by_label(measured(spec, tmp_path_factory.mktemp("locks"))).values()
    facts = told(result)
    assert facts.reference == f"{theirs.url}/v1#tiny"
    assert facts.kld_low < 1e-3
    assert facts.top1_agreement == 1
    assert result.metrics["kld_mean"].value is None
    assert "instead of fp32" in str(result.metrics["kld_mean"].reason)
