"""torch_compile changes what runs a step or a pass, and not what comes out."""

import sysconfig
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from optigpu.backends.torch.passes import PassModel
from optigpu.hardware import probe
from optigpu.techniques.base import Notes, Technique
from optigpu.techniques.compilation.export_aot import ExportAot
from optigpu.techniques.compilation.torch_compile import TorchCompile
from optigpu.techniques.quantization.int8_weight_only import Int8WeightOnly
from optigpu.vocabulary import DeviceKind, ReplicateError, Task, UnsupportedError
from tests.engine.decoded import NEW_TOKENS, assert_same_logits, operators_run
from tests.engine.tiny_models import assert_needs_hook, ignore, prompt, runtime_of

pytestmark = pytest.mark.usefixtures("models_dir", "one_torch_thread")


@pytest.mark.slow
def test_torch_compile_leaves_no_operator_of_the_step_to_the_interpreter_and_is_found_again() -> None:
    def claim() -> None:
        runtime = runtime_of("path:gpt2", TorchCompile())
        runtime.generate(prompt(), NEW_TOKENS)
        assert (
            operators_run(runtime)["aten::native_layer_norm"] == 5
        )  # the prefill: two for each of two layers, and one
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


@pytest.mark.slow
def test_a_compiled_int8_step_decodes_right_again_and_again() -> None:
    """Other families' steps are compiled with kernels of ours in test_techniques_norms.py and _activations.py."""
    from torch._dynamo.utils import counters

    runtime = runtime_of("path:opt", TorchCompile(), Int8WeightOnly())
    first = runtime.generate(prompt(), NEW_TOKENS).tokens
    graphs = counters["stats"]["unique_graphs"]
    plain = runtime_of("path:opt", Int8WeightOnly())
    assert first.equal(plain.generate(prompt(), NEW_TOKENS).tokens)
    assert first.equal(runtime.generate(prompt(), NEW_TOKENS).tokens)
    assert_same_logits(runtime, plain, "opt")
    assert counters["stats"]["unique_graphs"] == graphs


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
    import torch

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
    import torch

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
    import torch

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


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"backend": "eager", "mode": "max-autotune"}, "needs the backend inductor"),
        ({"backend": "cudagraphs", "dynamic": True}, "needs fixed shapes"),
        ({"backend": "tvm"}, "inductor"),
    ],
)
def test_parameters_that_make_no_sense_are_refused(parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        TorchCompile(**parameters)


def test_later_parameters_change_the_digest_only_where_they_are_used() -> None:
    assert TorchCompile().identity() == {"name": "torch_compile", "mode": "default", "version": 1}
    assert TorchCompile(dynamic=True).identity()["dynamic"] is True


def passing(task: Task, model: str, *stack: Technique) -> PassModel:
    return PassModel(task, model, stack, DeviceKind.CPU, seed=0, progress=ignore)


def broken_layers(count: int) -> Any:
    """Layers that differ in a number, and in the middle of each torch.compile cannot go on within one graph."""
    import torch

    class Layer(torch.nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number

        def forward(self, x: Any) -> Any:
            x = x + self.number
            torch._dynamo.graph_break()
            return x * self.number

    return torch.nn.Sequential(*map(Layer, range(1, count + 1)))
