"""export_aot decodes with a library that computes with the model's own weights and cache, and is kept."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from optigpu.models.loading.footprint import weight_bytes
from optigpu.techniques.base import Technique
from optigpu.techniques.compilation.export_aot import ExportAot, exported
from optigpu.techniques.compilation.export_aot import package as aot_package
from optigpu.techniques.compilation.export_aot.package import Package
from optigpu.techniques.memory.inference_mode import InferenceMode
from optigpu.techniques.memory.int8_kv_cache import Int8KvCache
from optigpu.techniques.memory.sliding_kv_cache import SlidingKvCache
from optigpu.techniques.memory.static_kv_cache import StaticKvCache
from optigpu.techniques.quantization.int8_weight_only import Int8WeightOnly
from optigpu.vocabulary import ReplicateError, UnsupportedError
from tests.breadth import cases
from tests.engine.decoded import NEW_TOKENS, assert_same_logits, operators_run
from tests.engine.tiny_models import FAMILIES, assert_needs_hook, prompt, runtime_of

pytestmark = pytest.mark.usefixtures("models_dir", "one_torch_thread")
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
    monkeypatch.setattr(exported, "load_package", interpreted)
    runtime = runtime_of(f"path:{family}", ExportAot(), *others)
    plain = runtime_of(f"path:{family}", StaticKvCache(), *others)
    for _ in range(2):
        tokens = runtime.generate(prompt(), NEW_TOKENS).tokens
        assert tokens.equal(plain.generate(prompt(), NEW_TOKENS).tokens)
    assert_same_logits(runtime, plain, family)
    with pytest.raises(ReplicateError, match="What export_aot made takes only the batch size"):
        runtime.generate(prompt(1), NEW_TOKENS)


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
    import torch
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
    import torch

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
    return Package(lambda inputs: list(module(*inputs)), False, 0.0, 0.0, 0)
