"""Every technique of the torch backend on GPT-2, Llama, Qwen and two image models: it runs, or it says why not."""

from pathlib import Path
from typing import Any

import pytest

from optigpu.documents.shapes import ModelFacts
from optigpu.techniques import TECHNIQUES
from optigpu.vocabulary import DeviceKind, UnsupportedError
from optigpu.workloads import WORKLOADS
from tests.engine.here import here
from tests.engine.image_models import image_runtime, prefill_runtime
from tests.engine.tiny_models import prompt, runtime_of
from tests.engine.training import LLAMA, RESNET, VIT, losses_of, trained

pytestmark = pytest.mark.usefixtures("models_dir", "one_torch_thread", "forked_ranks")
SHAPES = ("gpt2", "llama", "qwen2")
IMAGES = ("resnet", "vit")
NEW_TOKENS = 4
REFUSED = {
    ("fused_layernorm", "llama"): "LayerNorm",
    ("fused_layernorm", "qwen2"): "LayerNorm",
    ("fused_rmsnorm", "gpt2"): "RMSNorm",
    ("fused_gelu", "llama"): "MLP",
    ("fused_gelu", "qwen2"): "MLP",
    ("fused_swiglu", "gpt2"): "gated",
    ("fused_qkv", "gpt2"): "one matrix",
    ("fused_attention", "resnet"): "attention",
    ("eager_attention", "resnet"): "attention",
    ("gradient_checkpointing", "resnet"): "no block",
    ("fused_gelu", "resnet"): "fused_gelu",
    ("fused_qkv", "resnet"): "fused_qkv",
    ("llm_int8", "resnet"): "llm_int8",
    ("nf4", "resnet"): "nf4",
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
    *(
        ("torch_compile", shape) for shape in SHAPES
    ),  # test_techniques_compilation.py, _norms.py, _activations.py
    *(("export_aot", shape) for shape in SHAPES),  # test_techniques_export_aot.py
    *(("torch_compile", pass_) for pass_ in ("prefill", "vit")),  # test_techniques_compilation.py
}
"""What takes half a minute and is tested on that very shape in the technique's own file."""


PARAMETERS = {("torch_compile", "resnet"): {"backend": "eager"}}
"""TorchInductor's code for a pass of images is tested on ViT; what a shape decides is whether it is one graph."""

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


PREFILLING = [marked(name) for name in names_for("prefill") if (name, "prefill") not in ELSEWHERE]


@pytest.mark.parametrize("name", PREFILLING)
def test_it_prefills_or_says_why_not(name: str) -> None:
    technique: Any = TECHNIQUES[name](name=name)
    shape = "llama" if refusal(name, "gpt2") and not refusal(name, "llama") else "gpt2"
    word = refusal(name, shape)
    if word:
        with pytest.raises(UnsupportedError, match=word):
            prefill_runtime(f"path:{shape}", technique)
        return
    passed = prefill_runtime(f"path:{shape}", technique).forward(prompt(2))
    assert passed.chosen.shape == (2,)
    assert bool(passed.logits.isfinite().all())


CLASSIFYING = [
    marked(name, shape, by_default=shape == IMAGES[place % len(IMAGES)])
    for place, name in enumerate(names_for("classify"))
    for shape in IMAGES
    if (name, shape) not in ELSEWHERE
]


@pytest.mark.parametrize(("name", "shape"), CLASSIFYING)
def test_it_classifies_or_says_why_not(name: str, shape: str) -> None:
    import torch

    technique: Any = TECHNIQUES[name](name=name, **PARAMETERS.get((name, shape), {}))
    model, word = f"preset:tiny-{shape}-test", refusal(name, shape)
    if word:
        with pytest.raises(UnsupportedError, match=word):
            image_runtime(model, technique)
        return
    runtime = image_runtime(model, technique)
    images = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0)).to(runtime.model.dtype)
    passed = runtime.forward(images)
    assert passed.chosen.shape == (1,)
    assert bool(passed.logits.isfinite().all())


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


def test_the_others_run_on_gpus_that_torch_calls_cuda() -> None:
    of_torch = {name for name, kind in TECHNIQUES.items() if "torch" in kind.backends}
    others = of_torch - set(names_for("generate")) - set(names_for("train_step"))
    assert {device for name in others for device in TECHNIQUES[name].devices} == {
        DeviceKind.CUDA,
        DeviceKind.ROCM,
    }
