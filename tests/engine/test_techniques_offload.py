"""cpu_offload's schedule with plain copies between two places of the host: what is where, when, and what comes out."""

from typing import Any

import pytest
import torch

from optigpu.backends.torch import applied, device
from optigpu.backends.torch.applied import DecodingModel
from optigpu.backends.torch.stack import load_options
from optigpu.job.spec import JobSpec, resolve
from optigpu.models.loading.footprint import weight_bytes
from optigpu.techniques.base import Notes, Technique
from optigpu.techniques.memory.cpu_offload import CpuOffload, streaming
from optigpu.techniques.memory.cpu_offload.streaming import ALIGNMENT, decoder_layers, offload
from optigpu.techniques.memory.inference_mode import InferenceMode
from optigpu.techniques.memory.int8_kv_cache import Int8KvCache
from optigpu.techniques.memory.static_kv_cache import StaticKvCache
from optigpu.techniques.quantization.bf16 import Bf16
from optigpu.techniques.quantization.int8_weight_only import Int8WeightOnly
from optigpu.vocabulary import DeviceKind, SpecError, UnsupportedError
from tests.engine.tiny_models import FAMILIES, VOCABULARY, assert_needs_hook, ignore, prompt, runtime_of

pytestmark = pytest.mark.usefixtures("one_torch_thread")
LAYERS = [1, 2, 3, 4]
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


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layers", LAYERS)
def test_outputs_keep_every_bit(family: str, layers: int) -> None:
    model = model_of(family, layers)
    logits, tokens = outputs(model)
    lane = StrictLane()
    place(model, lane)
    for _ in range(2):
        assert outputs(model)[0].equal(logits)
        assert outputs(model)[1].equal(tokens)


def test_each_layer_is_sent_for_while_the_one_before_computes() -> None:
    model, lane = model_of("gpt2", 3), StrictLane()
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


@pytest.mark.parametrize("family", FAMILIES)
def test_one_layer_computes_on_the_device_and_the_others_are_on_the_host(family: str) -> None:
    model = model_of(family, 3)
    before = weight_bytes(model)
    per_layer = [sum(map(room, tensors_of(layer))) for layer in decoder_layers(model)]
    facts = place(model, PlainLane())
    assert facts == {
        "offloaded_layers": 3,
        "offloaded_bytes": sum(per_layer),
        "staging_bytes": 2 * max(per_layer),
    }
    homes = [addresses(layer) for layer in decoder_layers(model)]
    visits: list[list[int]] = []
    for layer in decoder_layers(model):
        inner = next(module for module in layer.modules() if not list(module.children()))
        inner.register_forward_hook(lambda *_: visits.append(away(model, homes)))
    outputs_once(model)
    assert visits == [[0], [1], [2]]
    assert away(model, homes) == []
    padding = sum(per_layer) - sum(
        tensor.nbytes for layer in decoder_layers(model) for tensor in tensors_of(layer)
    )
    assert weight_bytes(model) == before + padding


def test_a_tied_head_stays_tied_and_what_is_shared_with_a_layer_stays_with_the_rest() -> None:
    model = model_of("gpt2", 3)
    inner = model.transformer
    inner.h[0].ln_1.weight = inner.ln_f.weight
    inner.h[2].mlp = inner.h[1].mlp
    logits, _ = outputs(model)
    home = inner.ln_f.weight.data_ptr()
    place(model, StrictLane())
    assert outputs(model)[0].equal(logits)
    assert model.lm_head.weight is inner.wte.weight
    assert inner.h[0].ln_1.weight.data_ptr() == home


@pytest.mark.parametrize("family", FAMILIES)
def test_int8_buffers_travel_as_well(family: str) -> None:
    import torch

    model = model_of(family, 3)
    Int8WeightOnly().modules(model, Notes())
    logits, _ = outputs(model)
    place(model, StrictLane())
    kinds = {tensor.dtype for tensor in tensors_of(decoder_layers(model)[0])}
    assert kinds == {torch.int8, torch.float32}
    assert outputs(model)[0].equal(logits)


def test_a_weight_keeps_the_order_of_its_dimensions_and_loses_its_gaps() -> None:
    """Kernels may need the one; the other would cross the bus for nothing."""
    import torch

    model = model_of("gpt2", 3)
    first, second = (model.transformer.h[number].mlp.c_fc for number in (0, 1))
    first.weight.data = first.weight.data.T.contiguous().T
    second.weight.data = torch.cat([second.weight.data, second.weight.data], dim=1)[:, : second.nf]
    logits, _ = outputs(model)
    strides = first.weight.stride()
    assert not first.weight.is_contiguous()
    place(model, StrictLane())
    assert outputs(model)[0].equal(logits)
    assert first.weight.stride() == strides
    assert second.weight.is_contiguous()


def test_a_layer_that_fails_leaves_its_weights_at_home() -> None:
    model = model_of("llama", 3)
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


def test_a_host_without_memory_leaves_the_model_as_it_was() -> None:
    class SmallLane(PlainLane):
        def empty(self, size: int) -> Any:
            if hasattr(self, "full"):
                raise MemoryError("no pinned memory")
            self.full = True
            return super().empty(size)

    model = model_of("gpt2", 3)
    logits, _ = outputs(model)
    with pytest.raises(MemoryError):
        place(model, SmallLane())
    hooks = [layer for layer in decoder_layers(model) if layer._forward_hooks or layer._forward_pre_hooks]
    assert hooks == []
    assert outputs(model)[0].equal(logits)


def test_a_model_without_decoder_layers_is_refused() -> None:
    model = model_of("gpt2", 2)
    model.config.n_layer = 7
    with pytest.raises(UnsupportedError, match="a list of decoder layers, and this one has none"):
        place(model, PlainLane())


def test_weights_of_a_kind_of_their_own_are_refused_before_anything_is_moved() -> None:
    import torch

    class Odd(torch.nn.Parameter):
        pass

    model = model_of("gpt2", 2)
    layer = model.transformer.h[1].ln_2
    layer.weight = Odd(layer.weight.data, requires_grad=False)
    before = addresses(model)
    with pytest.raises(UnsupportedError, match="layers hold Odd"):
        place(model, PlainLane())
    assert addresses(model) == before


@pytest.fixture
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both places are the host, and the copies are plain."""
    import torch

    monkeypatch.setattr(streaming, "destination", lambda: (torch.device("cpu"), StrictLane()))


@pytest.mark.usefixtures("models_dir", "on_the_host")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "others",
    [(), (InferenceMode(), StaticKvCache()), (Bf16(), Int8KvCache())],
    ids=lambda others: " + ".join(technique.name for technique in others) or "alone",
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


def test_cpu_offload_is_for_gpus_and_only_when_it_is_asked_for() -> None:
    from optigpu.hardware import probe

    spec = {"workload": {"kind": "generate"}, "model": "preset:gpt2", "stack": [{"name": "cpu_offload"}]}
    with pytest.raises(SpecError, match="cpu_offload runs on cuda, rocm, not on cpu"):
        JobSpec.model_validate(spec | {"device": "cpu"})
    assert JobSpec.model_validate(spec | {"device": "cuda"}).stack == (CpuOffload(),)
    assert not CpuOffload().suits(probe(), DeviceKind.CUDA)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ("autocast", "converted copy"),
        ("int8_dynamic", "loaded on the CPU"),
        ("torch_compile", "weights that stay in place"),
        ("int8_weight_only", "loaded on the CPU"),
        ("grad_enabled", "gradients need weights that stay in place"),
    ],
)
def test_what_needs_weights_that_stay_says_why(other: str, reason: str) -> None:
    from optigpu.techniques import TECHNIQUES

    with pytest.raises(SpecError, match=reason):
        resolve((CpuOffload(), TECHNIQUES[other](name=other)), "generate")


def model_of(family: str, layers: int) -> Any:
    """A tiny model of so many layers, all of whose weights are different."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    count = "n_layer" if family == "gpt2" else "num_hidden_layers"
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    config = AutoConfig.for_model(
        family, vocab_size=VOCABULARY, **special, **FAMILIES[family] | {count: layers}
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def place(model: Any, lane: PlainLane) -> dict[str, int]:
    import torch

    return offload(model, torch.device("cpu"), lane)


def outputs(model: Any) -> tuple[Any, Any]:
    """Logits of a prompt, and tokens that were decoded with a cache."""
    tokens = model.generate(prompt(), max_new_tokens=NEW_TOKENS, do_sample=False)
    return outputs_once(model), tokens


def outputs_once(model: Any) -> Any:
    import torch

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


def room(tensor: Any) -> int:
    """Bytes of a tensor with what aligns the next one."""
    return -(-int(tensor.nbytes) // ALIGNMENT) * ALIGNMENT
