"""Techniques of weights on every family of decoders: a result, or one sentence; never another model's numbers."""

import re
from itertools import product
from typing import Any

import pytest
import torch

from optigpu.backends.torch.applied import DecodingModel
from optigpu.job.spec import resolve
from optigpu.surgery.places import exchange, expert_places
from optigpu.techniques import TECHNIQUES
from optigpu.vocabulary import DeviceKind, UnsupportedError
from tests.breadth import cases, long
from tests.engine.causal_families import causal_families, causal_model
from tests.engine.mixtures import MIXTURES
from tests.engine.tiny_models import ignore, prompt

pytestmark = pytest.mark.usefixtures("one_torch_thread")
NAMES = ("int8_weight_only", "int8_hybrid", "int4_weight_only", "int8_dynamic", "nf4", "llm_int8")
FAMILIES = causal_families()
READ = {
    "mamba": (("int8_weight_only", "int8_hybrid"), "layers.0.mixer.dt_proj"),
    "jamba": (("int8_weight_only", "nf4"), "layers.0.mamba.dt_proj"),
    "hunyuan_v1_moe": (("int8_weight_only", "int8_dynamic"), "layers.0.mlp.gate.wg"),
    "rwkv": (("int8_weight_only",), "blocks.0.feed_forward.value"),
    "llama4_text": (("int8_hybrid",), "embed_tokens"),
}
"""By family: techniques, and a layer whose weight the model reads by itself."""

SPECIAL = sorted({*READ, *MIXTURES, "dbrx", "inkling_text", "olmo", "recurrent_gemma"})
QUICK = [(family, NAMES[number % len(NAMES)]) for number, family in enumerate(SPECIAL)]
"""Families that hold or read their weights in other ways, each with one technique."""


def applied(model: Any, name: str) -> DecodingModel:
    stack = resolve((TECHNIQUES[name](name=name),), "generate")
    return DecodingModel(model, stack, DeviceKind.CPU, seed=0, progress=ignore)


def at(model: Any, end: str) -> Any:
    """The first module whose path ends so."""
    return next(module for path, module in model.named_modules() if path.endswith(end))


def applied_or_sentence(family: str, name: str) -> DecodingModel | str:
    try:
        return applied(causal_model(family), name)
    except UnsupportedError as error:
        return str(error)


def assert_result_or_sentence(family: str, name: str) -> None:
    decoder = applied_or_sentence(family, name)
    if isinstance(decoder, str):
        assert re.fullmatch(r"\w+ .*\.", decoder)
        return
    assert decoder.generate(prompt(1), 3).tokens.shape == (1, 3)
    assert bool(next(decoder.whole(prompt(1), 7)).isfinite().all())
    assert decoder.quantized is not None
    assert 0 < decoder.quantized <= 1


@pytest.mark.parametrize(("family", "name"), cases(QUICK, len(NAMES)))
def test_a_family_is_quantized_or_says_why_not(family: str, name: str) -> None:
    assert_result_or_sentence(family, name)


@pytest.mark.long
@pytest.mark.parametrize(("family", "name"), [pair for pair in product(FAMILIES, NAMES) if pair not in QUICK])
def test_a_family_is_quantized_by_every_technique_or_says_why_not(family: str, name: str) -> None:
    assert_result_or_sentence(family, name)


@pytest.mark.parametrize(
    "family",
    [family if family in MIXTURES else long(family) for family in FAMILIES],
)
def test_opened_experts_of_every_family_compute_what_transformers_does(family: str) -> None:
    model = causal_model(family)
    with torch.no_grad():
        wanted = model(prompt(), use_cache=False).logits
        exchange(expert_places(model), lambda layer: layer)
        found = model(prompt(), use_cache=False).logits
    assert float((found - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())


@pytest.mark.parametrize(
    ("family", "name", "path"),
    [(family, name, path) for family, (names, path) in READ.items() for name in names],
)
def test_a_layer_whose_weight_the_model_reads_stays_and_the_share_says_so(
    family: str, name: str, path: str
) -> None:
    model = causal_model(family)
    whole = sum(parameter.numel() for parameter in model.parameters())
    kept: Any = at(model, path)
    decoder = applied(model, name)
    assert at(model, path) is kept
    assert type(kept) in (torch.nn.Linear, torch.nn.Embedding)
    assert decoder.quantized is not None
    assert decoder.quantized <= 1 - kept.weight.numel() / whole
    assert decoder.generate(prompt(1), 3).tokens.shape == (1, 3)


def test_a_model_without_norm_weights_keeps_its_dtype_and_device_when_all_is_quantized() -> None:
    decoder = applied(causal_model("olmo").to(torch.bfloat16), "int8_hybrid")
    assert decoder.quantized == 1
    assert (decoder.model.dtype, decoder.model.device.type) == (torch.bfloat16, "cpu")
