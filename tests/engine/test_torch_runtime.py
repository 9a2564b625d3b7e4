"""The numpy boundary of the torch backend: what goes in, what comes out, and what is not done twice."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optigpu.backends.torch.device import TorchDevice
from optigpu.backends.torch.runtime import TorchDecodingRuntime
from optigpu.documents.shapes import Footprint
from optigpu.techniques.quantization.bf16 import Bf16
from optigpu.vocabulary import DeviceKind, UnsupportedError
from tests.engine.tiny_models import VOCABULARY, asked, prompt, runtime_of

pytestmark = pytest.mark.usefixtures("models_dir")
IDS = prompt().numpy()


@pytest.fixture(scope="module")
def runtime(models_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> TorchDecodingRuntime:
    return asked(runtime_of("path:llama", Bf16()), tmp_path_factory.mktemp("job"))


def test_tokens_and_logits_are_those_of_the_model_in_numpy(runtime: TorchDecodingRuntime) -> None:
    made = runtime.generate(IDS, 4)
    assert (made.tokens.dtype, made.tokens.shape, len(made.gaps_s)) == (np.dtype(np.int64), (2, 4), 4)
    assert np.array_equal(made.tokens, runtime.decoding.generate(prompt(), 4).tokens.numpy())
    logits = runtime.logits(IDS)
    assert (logits.dtype, logits.shape) == (np.dtype(np.float32), (2, VOCABULARY))
    assert np.array_equal(logits.argmax(axis=-1), made.tokens[:, 0])
    scored = list(runtime.score(IDS, 5))
    assert len(scored) == 3
    assert np.array_equal(scored[-1], logits)
    assert [each.shape for each in runtime.whole(IDS, 5)] == [(2, VOCABULARY)] * 3
    sampled = runtime.sample(3, 6)
    assert (sampled.dtype, sampled.shape) == (np.dtype(np.int64), (3, 6))
    assert runtime.scoring_s(IDS, 5) > 0


def test_a_generation_keeps_its_tokens_whatever_the_next_one_gives(runtime: TorchDecodingRuntime) -> None:
    first = runtime.generate(IDS, 4).tokens
    kept = first.copy()
    runtime.generate((IDS + 1) % VOCABULARY, 4)
    assert np.array_equal(first, kept)


def test_the_weights_say_what_they_take_now_and_how_many_there_were(runtime: TorchDecodingRuntime) -> None:
    weights, footprint = runtime.weights(), runtime.footprint()
    assert weights.parameters == sum(each.numel() for each in runtime.decoding.model.parameters())
    assert weights.bytes is not None
    assert weights.parameters is not None
    assert weights.bytes == pytest.approx(2 * weights.parameters, rel=0.01)
    assert weights.hash_of == "files"
    assert isinstance(footprint, Footprint)
    assert 0 < footprint.streamed_bytes < weights.bytes


def test_a_model_without_a_tokenizer_says_so(runtime: TorchDecodingRuntime) -> None:
    with pytest.raises(UnsupportedError, match="path:llama cannot be loaded here"):
        runtime.encode("words")


def test_the_same_inputs_are_moved_to_the_device_once() -> None:
    place, other = TorchDevice(DeviceKind.CPU, seed=0), IDS.copy()
    first: Any = place.tensor(IDS)
    assert place.tensor(IDS) is first
    assert place.tensor(other) is not first
    assert place.tensor(IDS) is not first, "only the last one is kept"
