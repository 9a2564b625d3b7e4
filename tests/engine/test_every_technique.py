"""Every technique of the torch backend on models of text, and in training: it runs, or it says why not."""

from pathlib import Path
from typing import Any

import pytest

from optigpu.documents.facts import ModelFacts
from optigpu.techniques import TECHNIQUES
from optigpu.vocabulary import DeviceKind, UnsupportedError
from optigpu.workloads import WORKLOADS
from tests.engine.machines import here
from tests.engine.tiny_models import prompt, runtime_of
from tests.engine.training import LLAMA, RESNET, VIT, losses_of, trained

pytestmark = pytest.mark.usefixtures("models_dir", "one_torch_thread")
SHAPES = ("gpt2", "llama", "qwen2")
NEW_TOKENS = 4
REFUSED = {
    ("fused_layernorm", "llama"): "LayerNorm",
    ("fused_layernorm", "qwen2"): "LayerNorm",
    ("fused_rmsnorm", "gpt2"): "RMSNorm",
    ("fused_gelu", "llama"): "MLP",
    ("fused_gelu", "qwen2"): "MLP",
    ("fused_swiglu", "gpt2"): "gated",
    ("fused_qkv", "gpt2"): "one matrix",
    ("gradient_checkpointing", "resnet"): "no block",
    **{(name, "resnet"): "no other linear layer" for name in ("lora", "qlora", "int8_finetune")},
    ("optimizer_8bit", "resnet"): "no larger one",
    **{("chunked_cross_entropy", shape): "a head" for shape in ("vit", "resnet")},
    **{("sequence_packing", shape): "models of text" for shape in ("vit", "resnet")},
    ("fp8", "any"): "FP8",
    ("gptq", "any"): "gptq",
    ("smaller_model", "any"): "needs a model",
    ("awq", "any"): "gptq",
}
"""What a technique cannot do to a shape, or on this machine to any, and a word of the sentence that says so."""

ELSEWHERE = {
    *(("torch_compile", shape) for shape in SHAPES),  # test_techniques_compilation.py, _fused_layers.py
    *(("export_aot", shape) for shape in SHAPES),  # test_techniques_compilation.py
}
"""What takes half a minute and is tested on that very shape in the technique's own file."""

IN_TRAINING = {"compile_training": {"backend": "aot_eager"}, "activation_offload": {"target": "disk"}}
"""TorchInductor takes a minute for a step, and a CPU's activations go to a disk alone."""

SLOW = ("torch_compile", "export_aot", "compile_training")
"""What compiles takes seconds for each shape."""


def marked(name: str, *others: str, by_default: bool = True) -> Any:
    """The parameters of a test, with its mark where it is slow, or one of those that `make test` leaves out."""
    marks = [pytest.mark.slow] * (name in SLOW) + [pytest.mark.long] * (not by_default)
    return pytest.param(name, *others, marks=marks)


def names_for(workload: str) -> list[str]:
    return [
        name
        for name, kind in TECHNIQUES.items()
        if WORKLOADS[workload].task in kind.tasks
        and DeviceKind.CPU in kind.devices
        and "torch" in kind.backends
    ]


def refusal(name: str, shape: str) -> str | None:
    return REFUSED.get((name, shape), REFUSED.get((name, "any")))


GENERATING = [
    marked(name, shape, by_default=shape == SHAPES[place % len(SHAPES)])
    for place, name in enumerate(names_for("generate"))
    for shape in SHAPES
    if (name, shape) not in ELSEWHERE
]
"""By default each technique on one shape, and each shape with a third of the techniques."""


@pytest.fixture(scope="module")
def facts(models_dir: Path) -> dict[str, ModelFacts]:
    """Of the models of text."""
    return {shape: runtime_of(f"path:{shape}").facts for shape in SHAPES}


@pytest.mark.parametrize(("name", "shape"), GENERATING)
def test_it_generates_or_says_why_not(name: str, shape: str, facts: dict[str, ModelFacts]) -> None:
    technique: Any = TECHNIQUES[name](name=name)
    word = refusal(name, shape)
    if word:
        reason = technique.check(here(), DeviceKind.CPU, facts[shape])
        assert reason is not None
        assert word in reason
        with pytest.raises(UnsupportedError, match=word):
            runtime_of(f"path:{shape}", technique)
        return
    assert technique.check(here(), DeviceKind.CPU, facts[shape]) is None
    runtime = runtime_of(f"path:{shape}", technique)
    tokens = runtime.generate(prompt(1), NEW_TOKENS).tokens
    assert tokens.shape == (1, NEW_TOKENS)
    assert bool(runtime.logits(prompt(1)).isfinite().all())


TRAINED = ((LLAMA, "llama"), (VIT, "vit"), (RESNET, "resnet"))
TRAINING = [
    marked(name, *trained_one, by_default=trained_one == TRAINED[place % len(TRAINED)])
    for place, name in enumerate(names_for("train_step"))
    for trained_one in TRAINED
]


@pytest.mark.parametrize(("name", "model", "shape"), TRAINING)
def test_it_trains_or_says_why_not(name: str, model: str, shape: str) -> None:
    technique: Any = TECHNIQUES[name](name=name, **IN_TRAINING.get(name, {}))
    word = refusal(name, shape)
    if word:
        with pytest.raises(UnsupportedError, match=word):
            trained(model, technique)
        return
    losses = losses_of(trained(model, technique))
    assert losses[2] < losses[1] < losses[0]
