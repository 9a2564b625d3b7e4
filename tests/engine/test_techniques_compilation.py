"""torch_compile and export_aot change what runs a step or a pass, and not what comes out."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from optigpu.backends.torch.applied import PassModel
from optigpu.hardware import probe
from optigpu.models.loading.footprint import weight_bytes
from optigpu.surgery import made_steps as aot_package
from optigpu.surgery.made_steps import Package
from optigpu.techniques.base import Notes, Technique
from optigpu.techniques.compilation.export_aot import ExportAot
from optigpu.techniques.compilation.torch_compile import TorchCompile
from optigpu.techniques.memory.inference_mode import InferenceMode
from optigpu.techniques.memory.int8_kv_cache import Int8KvCache
from optigpu.techniques.memory.sliding_kv_cache import SlidingKvCache
from optigpu.techniques.memory.static_kv_cache import StaticKvCache
from optigpu.techniques.quantization.int8_weight_only import Int8WeightOnly
from optigpu.vocabulary import DeviceKind, ReplicateError, Task, UnsupportedError
from tests.breadth import cases
from tests.engine.decoded import NEW_TOKENS, assert_same_logits, operators_run
from tests.engine.tiny_models import FAMILIES, assert_needs_hook, ignore, prompt, runtime_of

pytestmark = pytest.mark.usefixtures("models_dir", "one_torch_thread")


@pytest.mark.slow
def test_torch_compile_leaves_no_operator_of_the_step_to_the_interpreter_and_is_found_again() -> None:
    def claim() -> None:
        runtime = runtime_of("path:gpt2", TorchCompile())
        runtime.generate(prompt(), NEW_TOKENS)
        assert operators_run(runtime)["aten::native_layer_norm"] == 5
        facts = runtime.notes.facts
        assert (facts["compiled_graphs"], facts["graph_breaks"]) == (1, 0)
        assert facts["decode_loop"] == "lean loop"
        assert facts["inductor_cache_hits"] + facts["inductor_cache_misses"] == 1
        assert facts["compile_trace_s"] > 0
        assert facts["compile_backend_s"] > facts["compile_build_s"] >= 0

    assert_needs_hook(TorchCompile(), "step", claim)
    again = runtime_of("path:gpt2", TorchCompile())
    again.generate(prompt(), NEW_TOKENS)
    facts = again.notes.facts
    assert (facts["inductor_cache_hits"], facts["inductor_cache_misses"]) == (1, 0)


@pytest.mark.long
def test_a_compiled_step_refuses_another_batch() -> None:
    runtime = runtime_of("path:gpt2", TorchCompile(backend="eager"))
    runtime.generate(prompt(2), NEW_TOKENS)
    with pytest.raises(ReplicateError, match="batch size"):
        runtime.generate(prompt(1), NEW_TOKENS)


@pytest.mark.long
def test_a_dynamic_step_takes_other_batches_and_lengths_without_compiling_again() -> None:
    """But for batches of one, which get a graph of their own. A batch of two and two heads are not the same two."""
    from torch._dynamo.utils import counters

    runtime = runtime_of("path:llama", TorchCompile(dynamic=True, backend="eager"))
    plain = runtime_of("path:llama")
    graphs = []
    for batch, length, new_tokens in ((2, 8, 4), (3, 5, 9), (1, 8, 4)):
        before = counters["stats"]["unique_graphs"]
        tokens = runtime.generate(prompt(batch, length), new_tokens).tokens
        assert tokens.equal(plain.generate(prompt(batch, length), new_tokens).tokens)
        graphs.append(counters["stats"]["unique_graphs"] - before)
    assert graphs == [1, 0, 1]


@pytest.mark.slow
def test_a_graph_break_is_an_error_or_is_counted() -> None:
    """With one in each of many layers none is left to the interpreter: by default torch would compile eight of them."""
    layers, inputs = broken_layers(12), torch.ones(2, 3)
    with pytest.raises(
        UnsupportedError, match=r"cannot make one graph of this model .* set fullgraph to false"
    ):
        TorchCompile(backend="eager").forward(layers, Notes())(inputs)
    notes = Notes()
    compiled = TorchCompile(backend="eager", fullgraph=False).forward(layers, notes)
    assert compiled(inputs).equal(layers(inputs))
    assert compiled(inputs + 1).equal(layers(inputs + 1))
    facts = notes.facts
    assert facts["graph_breaks"] >= 1
    assert facts["compiled_graphs"] >= 2 * 12
    assert facts["frames_interpreted"] == 0


@pytest.mark.long
def test_a_forward_pass_is_compiled_too() -> None:
    inputs = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    plain = passing(Task.IMAGES, "preset:tiny-vit-test").forward(inputs).logits

    def claim() -> None:
        runtime = passing(Task.IMAGES, "preset:tiny-vit-test", TorchCompile())
        assert float((runtime.forward(inputs).logits - plain).abs().max()) < 1e-5 * float(plain.abs().max())
        assert runtime.notes.facts.get("compiled_graphs") == 1
        with pytest.raises(ReplicateError, match="batch size"):
            runtime.forward(inputs[:1])

    assert_needs_hook(TorchCompile(), "forward", claim)


@pytest.mark.long
def test_a_compiled_prefill_gives_the_same_logits() -> None:
    compiled = passing(Task.PREFILL, "path:llama", TorchCompile(backend="eager"))
    plain = passing(Task.PREFILL, "path:llama")
    assert compiled.forward(prompt()).logits.equal(plain.forward(prompt()).logits)
    assert compiled.notes.facts["compiled_graphs"] == 1


@pytest.mark.slow
def test_a_torch_compile_that_is_switched_off_is_an_error_and_not_a_figure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    compiled = TorchCompile().forward(lambda x: x + 1, Notes())
    with pytest.raises(UnsupportedError, match=r"torch\.compile made 0 graphs instead of one"):
        compiled(torch.ones(2))


def test_torch_compile_needs_pythons_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sysconfig, "get_path", {"include": str(tmp_path)}.get)
    with pytest.raises(UnsupportedError, match=r"Python\.h is missing"):
        runtime_of("path:gpt2", TorchCompile())


def test_a_machine_that_cannot_compile_says_so() -> None:
    bare = probe().model_copy(update={"compiler": None})
    for technique in (TorchCompile(), ExportAot()):
        assert technique.check(probe(), DeviceKind.CPU, None) is None
        assert "install g++" in str(technique.check(bare, DeviceKind.CPU, None))
    assert TorchCompile(backend="eager").check(bare, DeviceKind.CPU, None) is None
    reason = TorchCompile(backend="cudagraphs").check(probe(), DeviceKind.CPU, None)
    assert "does not run on cpu" in str(reason)


def test_later_parameters_change_the_digest_only_where_they_are_used() -> None:
    assert TorchCompile().identity() == {"name": "torch_compile", "mode": "default", "version": 1}
    assert TorchCompile(dynamic=True).identity()["dynamic"] is True


def passing(task: Task, model: str, *stack: Technique) -> PassModel:
    return PassModel(task, model, stack, DeviceKind.CPU, seed=0, progress=ignore)


def broken_layers(count: int) -> Any:
    """Layers that differ in a number, and in the middle of each torch.compile cannot go on within one graph."""

    class Layer(torch.nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number

        def forward(self, x: Any) -> Any:
            x = x + self.number
            torch._dynamo.graph_break()
            return x * self.number

    return torch.nn.Sequential(*map(Layer, range(1, count + 1)))


# ---- export_aot: a library that computes with the model's own weights and cache, and is kept.


LAYERS = 2
LINEAR_LAYERS = 7 * LAYERS + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "others"),
    cases(
        [
            ("llama", (Int8KvCache(),)),
            ("gpt2", (SlidingKvCache(window=6, sinks=2),)),
            *((family, (InferenceMode(), Int8WeightOnly())) for family in FAMILIES),
        ]
    ),
)
def test_an_exported_graph_decodes_right_again_and_again(
    family: str, others: tuple[Technique, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run by the interpreter, operator by operator: compiling takes long and is tested once."""
    monkeypatch.setattr(aot_package, "load_package", interpreted)
    runtime = runtime_of(f"path:{family}", ExportAot(), *others)
    plain = runtime_of(f"path:{family}", StaticKvCache(), *others)
    for _ in range(2):
        tokens = runtime.generate(prompt(), NEW_TOKENS).tokens
        assert tokens.equal(plain.generate(prompt(), NEW_TOKENS).tokens)
    assert_same_logits(runtime, plain, family)
    with pytest.raises(ReplicateError, match="What export_aot made takes only the batch size"):
        runtime.generate(prompt(1), NEW_TOKENS)


@pytest.mark.slow
def test_a_model_that_cannot_be_exported_is_refused() -> None:
    runtime = runtime_of("path:gpt2", ExportAot())
    runtime.model.transformer.ln_f.register_forward_pre_hook(looking_at_values)
    with pytest.raises(UnsupportedError, match=r"torch\.export cannot make one graph of this model"):
        runtime.generate(prompt(), NEW_TOKENS)


def looking_at_values(module: Any, arguments: Any) -> None:
    """What a graph without values cannot do."""
    if arguments[0].sum() > 0:
        arguments[0].add_(0)


@pytest.fixture(scope="module")
def kept_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The cache folder of the one package that is compiled here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield aot_package.folder()


@pytest.mark.long
def test_a_library_computes_with_the_models_own_weights_and_is_kept_for_the_next(
    kept_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One compilation: an int8 model, whose operator is ours, and then another model of the same graph."""
    made: list[dict[str, str]] = []
    made_of = aot_package.made_of

    def noted(graph: Any) -> dict[str, str]:
        made.append(made_of(graph))
        return made[-1]

    monkeypatch.setattr(aot_package, "made_of", noted)
    stack = (Int8WeightOnly(), ExportAot())
    plain = runtime_of("path:llama", Int8WeightOnly(), StaticKvCache())

    def claim() -> None:
        runtime = runtime_of("path:llama", *stack)
        for _ in range(3):
            tokens = runtime.generate(prompt(), NEW_TOKENS).tokens
            assert tokens.equal(plain.generate(prompt(), NEW_TOKENS).tokens)
        facts = runtime.notes.facts
        others = {name for each in made for name in each if each[name] != made[0][name]}
        assert not others, "The same model was exported as another graph."
        assert facts.get("aot_cache_hit") is hit
        assert facts["aot_library_bytes"] == next(kept_folder.glob("*.pt2")).stat().st_size
        assert min(facts[name] for name in ("aot_export_s", "aot_build_s", "aot_load_s")) > 0
        counts = operators_run(runtime)
        assert counts["optigpu::int8_linear"] == LINEAR_LAYERS * NEW_TOKENS
        assert counts["aten::silu"] == LAYERS  # the prefill's
        assert_same_logits(runtime, plain, "llama")
        assert weight_bytes(runtime.model) == weight_bytes(plain.model)

    hit = False
    assert_needs_hook(ExportAot(), "step", claim)
    assert len(list(kept_folder.glob("*.pt2"))) == 1
    hit = True
    claim()
    other = runtime_of("path:llama", *stack)
    for model in (plain.model, other.model):
        model.model.norm.weight.mul_(-0.5)
        model.model.layers[0].mlp.up_proj.scale.mul_(1.5)
    other.generate(prompt(), NEW_TOKENS)  # which loads a library for a cache of that length
    assert_same_logits(other, plain, "llama")
    assert other.notes.facts["aot_cache_hit"]
    for model in (plain.model, other.model):  # also after it was loaded
        model.model.layers[1].input_layernorm.weight.mul_(0.5)
    assert_same_logits(other, plain, "llama")


@pytest.mark.slow
def test_what_inductor_notes_about_the_last_package_makes_no_other_package_but_a_setting_does() -> None:
    """It notes them among its settings, where they stay as long as the process lives (torch 2.13)."""
    from torch._inductor import config

    graph = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
    before = aot_package.made_of(graph)
    with config.patch({"aot_inductor.metadata": {"AOTI_DEVICE_KEY": "cpu"}}):
        assert aot_package.made_of(graph) == before
    with config.patch(max_autotune=not config.max_autotune):
        assert aot_package.made_of(graph) != before


@pytest.mark.slow
def test_a_library_that_cannot_be_built_is_refused_and_leaves_no_half(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(exported: Any, *, package_path: str, inductor_configs: dict[str, Any]) -> None:
        Path(package_path).write_bytes(b"half")
        raise RuntimeError("C++ compile error\nand much more")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", fail)
    with pytest.raises(UnsupportedError, match=r"cannot compile this model here: C\+\+ compile error\."):
        runtime_of("path:gpt2", ExportAot()).generate(prompt(), NEW_TOKENS)
    assert list(aot_package.folder().glob("*.pt2")) == []


def interpreted(exported: Any) -> Package:
    """A package that interprets the graph on the tensors that it was made of."""
    module = exported.module(check_guards=False)
    return Package(lambda inputs: list(module(*inputs)), {}, False, 0.0, 0.0, 0)
