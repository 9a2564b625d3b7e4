"""cpu_offload's schedule with plain copies between two places of the host: what is where, when, and what comes out."""

from typing import Any

import pytest
import torch

from optigpu.backends.torch import applied, device, load_options
from optigpu.backends.torch.applied import DecodingModel
from optigpu.surgery import host_memory
from optigpu.surgery.host_memory import decoder_layers, offload
from optigpu.techniques.base import Technique
from optigpu.techniques.memory.cpu_offload import CpuOffload
from optigpu.techniques.memory.inference_mode import InferenceMode
from optigpu.techniques.memory.int8_kv_cache import Int8KvCache
from optigpu.techniques.memory.static_kv_cache import StaticKvCache
from optigpu.techniques.quantization.bf16 import Bf16
from optigpu.vocabulary import DeviceKind
from tests.breadth import spread
from tests.engine.decoder_models import configured
from tests.engine.tiny_models import FAMILIES, assert_needs_hook, ignore, prompt, runtime_of

pytestmark = pytest.mark.usefixtures("one_torch_thread")
NEW_TOKENS = 3


class PlainLane:
    """Copies that are complete when they return."""

    def empty(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def send(self, source: torch.Tensor, slot: int, target: torch.Tensor) -> None:
        target.copy_(source)

    def arrive(self, slot: int) -> None:
        pass

    def leave(self, slot: int) -> None:
        pass


class StrictLane(PlainLane):
    """Copies as late as it may, spoils a slot as early as it may, and writes down what it was asked for."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self.layers: dict[int, int] = {}
        self._waiting: dict[int, tuple[Any, Any]] = {}

    def empty(self, size: int) -> Any:
        buffer = super().empty(size)
        self.layers[buffer.data_ptr()] = len(self.layers)
        return buffer

    def send(self, source: Any, slot: int, target: Any) -> None:
        target.fill_(255)  # NaN in every type of floating point
        self._waiting[slot] = (source, target)
        self.log.append((f"layer {self.layers[source.data_ptr()]}", slot))

    def arrive(self, slot: int) -> None:
        self.log.append(("arrive", slot))
        if slot in self._waiting:
            source, target = self._waiting.pop(slot)
            target.copy_(source)

    def leave(self, slot: int) -> None:
        self.log.append(("leave", slot))


@pytest.mark.parametrize(("family", "layers"), spread(FAMILIES, [1, 2, 3, 4], by_default=4))
def test_outputs_keep_every_bit(family: str, layers: int) -> None:
    model = with_layers(family, layers)
    logits, tokens = outputs(model)
    lane = StrictLane()
    place(model, lane)
    for _ in range(2):
        assert outputs(model)[0].equal(logits)
        assert outputs(model)[1].equal(tokens)


def test_each_layer_is_sent_for_while_the_one_before_computes() -> None:
    model, lane = with_layers("gpt2", 3), StrictLane()
    place(model, lane)
    assert lane.log == [("leave", 0), ("leave", 1)], "the slots' memory may have been in use"
    lane.log.clear()
    for _ in range(2):
        outputs_once(model)
    assert lane.log == [
        *[("layer 0", 0), ("arrive", 0), ("layer 1", 1), ("leave", 0)],
        *[("arrive", 1), ("layer 2", 0), ("leave", 1)],
        *[("arrive", 0), ("layer 0", 1), ("leave", 0)],
        *[("arrive", 1), ("layer 1", 0), ("leave", 1)],
        *[("arrive", 0), ("layer 2", 1), ("leave", 0)],
        *[("arrive", 1), ("layer 0", 0), ("leave", 1)],
    ]


def test_a_tied_head_stays_tied_and_what_is_shared_with_a_layer_stays_with_the_rest() -> None:
    model = with_layers("gpt2", 3)
    inner = model.transformer
    inner.h[0].ln_1.weight = inner.ln_f.weight
    inner.h[2].mlp = inner.h[1].mlp
    logits, _ = outputs(model)
    home = inner.ln_f.weight.data_ptr()
    place(model, StrictLane())
    assert outputs(model)[0].equal(logits)
    assert model.lm_head.weight is inner.wte.weight
    assert inner.h[0].ln_1.weight.data_ptr() == home


def test_a_layer_that_fails_leaves_its_weights_at_home() -> None:
    model = with_layers("llama", 3)
    logits, _ = outputs(model)
    place(model, StrictLane())
    homes = [addresses(layer) for layer in decoder_layers(model)]

    def fail(*_: Any) -> None:
        raise RuntimeError("a kernel failed")

    block: Any = decoder_layers(model)[1]
    handle = block.mlp.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="a kernel failed"):
        outputs_once(model)
    handle.remove()
    assert away(model, homes) == []
    assert outputs(model)[0].equal(logits)


@pytest.fixture
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both places are the host, and the copies are plain."""
    monkeypatch.setattr(host_memory, "destination", lambda: (torch.device("cpu"), StrictLane()))


@pytest.mark.usefixtures("models_dir", "on_the_host")
@pytest.mark.parametrize(
    ("family", "others"),
    spread(
        FAMILIES, [((),), ((InferenceMode(), StaticKvCache()),), ((Bf16(), Int8KvCache()),)], by_default=3
    ),
)
def test_cpu_offload_decodes_what_the_others_decode_without_it(
    family: str, others: tuple[Technique, ...]
) -> None:
    plain = runtime_of(f"path:{family}", *others)
    tokens = plain.generate(prompt(), NEW_TOKENS).tokens

    def claim() -> None:
        runtime = runtime_of(f"path:{family}", CpuOffload(), *others)
        assert runtime.generate(prompt(), NEW_TOKENS).tokens.equal(tokens)
        assert runtime.logits(prompt()).equal(plain.logits(prompt()))
        facts = runtime.notes.facts
        assert facts.get("offloaded_layers") == 2
        assert facts["staging_bytes"] == facts["offloaded_bytes"]

    assert_needs_hook(CpuOffload(), "modules", claim)


def test_cpu_offload_loads_the_model_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loaded(Exception):  # noqa: N818 - it ends the test's way, and is no error
        pass

    def load(reference: Any, *, device: str, **options: Any) -> Any:
        raise Loaded(device)

    monkeypatch.setattr(device, "require", ignore)
    monkeypatch.setattr(device, "clock_for", ignore)
    monkeypatch.setattr(applied, "load_model", load)

    def claim() -> None:
        assert load_options((CpuOffload(),)).placement == "host"
        with pytest.raises(Loaded) as loaded:
            DecodingModel("preset:gpt2", (CpuOffload(),), DeviceKind.CUDA, seed=0, progress=ignore)
        assert loaded.value.args == ("cpu",)

    assert_needs_hook(CpuOffload(), "load", claim)


def with_layers(family: str, count: int) -> Any:
    """A tiny model of so many layers, all of whose weights are different."""
    return configured(family, **{"n_layer" if family == "gpt2" else "num_hidden_layers": count})


def place(model: Any, lane: PlainLane) -> dict[str, int]:
    return offload(model, torch.device("cpu"), lane)


def outputs(model: Any) -> tuple[Any, Any]:
    """Logits of a prompt, and tokens that were decoded with a cache."""
    tokens = model.generate(prompt(), max_new_tokens=NEW_TOKENS, do_sample=False)
    return outputs_once(model), tokens


def outputs_once(model: Any) -> Any:
    with torch.inference_mode():
        logits = model(input_ids=prompt(), use_cache=False).logits
    return logits.clone()


def tensors_of(module: Any) -> list[Any]:
    return [*module.parameters(), *module.buffers()]


def addresses(module: Any) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors_of(module)]


def away(model: Any, homes: list[list[int]]) -> list[int]:
    """The layers whose weights are not at home, all of them."""
    found = [addresses(layer) for layer in decoder_layers(model)]
    away_from = [not set(now) & set(home) for now, home in zip(found, homes, strict=True)]
    assert all(now == home for now, home, gone in zip(found, homes, away_from, strict=True) if not gone)
    return [number for number, gone in enumerate(away_from) if gone]
