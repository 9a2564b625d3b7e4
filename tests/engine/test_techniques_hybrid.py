"""int8_hybrid holds the bytes that its table of decisions tells; a mixture's experts are quantized as layers are."""

import copy
import json
import random
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from optigpu import quantize
from optigpu.backends.torch.applied import DecodingModel
from optigpu.job.spec import resolve
from optigpu.models.loading.footprint import weight_bytes
from optigpu.ops.four_bits.quantize import dequantize_groups, quantize_groups
from optigpu.ops.four_bits.scheme import Int4Scheme
from optigpu.surgery.bit_allocation import Candidate, Level, Stage, decide, least_bytes, total_bytes
from optigpu.surgery.places import checked_places, exchange, expert_places, linear_places, weight_of
from optigpu.techniques import TECHNIQUES
from optigpu.techniques.base import Notes, Technique
from optigpu.techniques.compilation.torch_compile import TorchCompile
from optigpu.techniques.quantization.bf16 import Bf16
from optigpu.techniques.quantization.int4_weight_only import Int4WeightOnly
from optigpu.techniques.quantization.int8_hybrid import Int8Hybrid
from optigpu.techniques.quantization.int8_weight_only import Int8WeightOnly
from optigpu.vocabulary import DeviceKind, UnsupportedError, check_document
from tests.breadth import cases, spread
from tests.engine.decoded import assert_right
from tests.engine.rounding import in_float64
from tests.engine.tiny_models import (
    FAMILIES,
    MIXTURES,
    assert_needs_hook,
    ignore,
    mixture,
    prompt,
    runtime_of,
    tiny_model,
)

pytestmark = pytest.mark.usefixtures("models_dir", "one_torch_thread")


@pytest.mark.parametrize(("family", "bits"), spread(FAMILIES, [8, 4], by_default=3))
def test_the_plan_tells_every_byte_that_the_model_then_holds(family: str, bits: Any) -> None:
    plain = runtime_of(f"path:{family}").model
    tied = plain.get_output_embeddings().weight is plain.get_input_embeddings().weight

    def claim() -> None:
        runtime = runtime_of(f"path:{family}", Int8Hybrid(bits=bits))
        model, facts = runtime.model, runtime.notes.facts
        assert linear_places(model) == []
        held = weight_bytes(model)
        assert sum(row["bytes"] for row in facts["hybrid_layers"]) == held
        assert facts["hybrid_share"] == round(held / weight_bytes(plain), 4)
        # Biases and norms count in a tiny model.
        assert held < weight_bytes(plain) * (0.36 if bits == 8 else 0.3)
        shared = storages(model.get_input_embeddings()) & storages(model.get_output_embeddings())
        assert bool(shared) == tied
        check_document(facts["hybrid_layers"])
        assert len(json.dumps(facts["hybrid_layers"])) < 4000

    assert_needs_hook(Int8Hybrid(bits=bits), "modules", claim)


def storages(module: Any) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in [*module.parameters(), *module.buffers()]}


@pytest.mark.parametrize(("family", "bits"), spread(FAMILIES, [8, 4], by_default=3))
def test_it_decodes_as_what_was_decided_and_rounding_allow(family: str, bits: Any) -> None:
    """Under a target that leaves room for layers of every kind."""
    technique = Int8Hybrid(bits=bits, memory_target=0.4 if bits == 8 else 0.3)
    runtime = runtime_of(f"path:{family}", technique)
    kinds = {row["kind"] for row in runtime.notes.facts["hybrid_layers"]}
    assert {"int8", "int8 + int8"} | ({"int4"} if bits == 4 else set()) <= kinds
    assert_right(runtime, as_decided(runtime_of(f"path:{family}").model, runtime), "float32")


@pytest.mark.parametrize(
    ("family", "bits", "beside", "dtype"),
    cases([("qwen2", 4, Bf16(), "bfloat16"), ("gpt2", 8, TorchCompile(), "float32")], 1),
)
def test_it_decodes_in_bf16_and_within_a_compiled_step(
    family: str, bits: Any, beside: Technique, dtype: str
) -> None:
    runtime = runtime_of(f"path:{family}", beside, Int8Hybrid(bits=bits))
    plain = runtime_of(f"path:{family}", *([beside] if isinstance(beside, Bf16) else [])).model
    assert_right(runtime, as_decided(plain, runtime), dtype)


def as_decided(plain: Any, runtime: DecodingModel) -> Any:
    """The plain model in float64 with weights rounded as the table of decisions says, apart from the code tested."""
    reference = in_float64(plain)
    head, embedding = reference.get_output_embeddings(), reference.get_input_embeddings()
    if head.weight is embedding.weight:
        head.weight = torch.nn.Parameter(embedding.weight.clone())
    kinds: dict[str, str] = {}
    for row in runtime.notes.facts["hybrid_layers"]:
        for name in row["layer"].split(" + "):
            kinds |= dict.fromkeys(every_path(name), row["kind"])
    with torch.no_grad():
        for path, module in reference.named_modules():
            if path in kinds:
                weight = weight_of(module)
                weight.copy_(ROUNDED[kinds[path]](weight))
    return reference


def every_path(name: str) -> list[str]:
    """ "h.0,2-3.c" as ["h.0.c", "h.2.c", "h.3.c"]."""
    match = re.search(r"\.([\d,-]+)\.", name)
    if not match:
        return [name]
    ends = [[int(end) for end in part.split("-")] for part in match[1].split(",")]
    numbers = [number for end in ends for number in range(end[0], end[-1] + 1)]
    return [name.replace(match[0], f".{number}.") for number in numbers]


def in_steps(weight: torch.Tensor) -> torch.Tensor:
    """Rounded to 127 steps of each row's largest, float64; what a number is nearest to is found out in float32."""
    weight = weight.float()
    largest = weight.abs().amax(dim=1, keepdim=True)
    scale = (largest / 127).masked_fill(largest == 0, 1)
    return (weight / scale).round().double() * scale.double()


def in_two_steps(weight: torch.Tensor) -> torch.Tensor:
    return in_steps(weight) + in_steps(weight.float() - in_steps(weight).float())


ROUNDED = {
    "int8": in_steps,
    "int8 + int8": in_two_steps,
    "int4": lambda weight: dequantize_groups(quantize_groups(weight.float(), Int4Scheme())).double(),
    "bfloat16": lambda weight: weight.bfloat16().double(),
}


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "target"), [(8, 0.26), (4, 0.16)])
def test_a_gpt2_of_some_size_meets_the_target_without_being_told(bits: Any, target: float) -> None:
    model = gpt2_of_some_size()
    before = weight_bytes(model)
    Int8Hybrid(bits=bits).modules(model, Notes())
    assert target * 0.97 < weight_bytes(model) / before <= target


def gpt2_of_some_size() -> Any:
    """10 million weights with the proportions of GPT-2, for which biases and norms count for as little."""
    shape = {"n_embd": 512, "n_layer": 2, "n_head": 8, "n_positions": 128, "vocab_size": 8003}
    torch.manual_seed(0)
    config = AutoConfig.for_model("gpt2", bos_token_id=0, eos_token_id=1, **shape)
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_target_that_cannot_be_met_is_refused_with_the_least_that_can(bits: Any) -> None:
    model = tiny_model("gpt2")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UnsupportedError, match=f"with {bits} bits this model needs at least") as refusal:
        Int8Hybrid(bits=bits, memory_target=0.05, smoothing=0.5).modules(model, Notes())
    assert len(linear_places(model)) == 9
    assert all(model.state_dict()[name].equal(tensor) for name, tensor in before.items())
    least = float(str(refusal.value).split("at least ")[1].split("%")[0]) / 100
    notes = Notes()
    Int8Hybrid(bits=bits, memory_target=least + 0.0001).modules(model, notes)
    assert notes.facts["hybrid_share"] <= least + 0.0001


def test_a_damaged_table_is_refused() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[3, 5] = torch.nan
    with pytest.raises(UnsupportedError, match="embed_tokens has weights that are NaN or infinite"):
        Int8Hybrid().modules(model, Notes())


# ---- Experts that transformers holds as tensors of three dimensions.


FLOAT_ERROR = 1e-5
"""Of the largest logit: what another order of float32 sums changes."""


def logits_after_prompt(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(prompt(), use_cache=False).logits
    return logits


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert float((found - wanted).abs().max()) <= FLOAT_ERROR * float(wanted.abs().max())


@pytest.mark.parametrize("family", MIXTURES)
def test_opened_experts_compute_what_transformers_does(family: str) -> None:
    model = mixture(family)
    wanted, held = logits_after_prompt(model), weight_bytes(model)
    exchange(expert_places(model), lambda layer: layer)
    assert not [name for name, weight in model.named_parameters() if weight.dim() > 2 and "conv" not in name]
    assert_close(logits_after_prompt(model), wanted)
    assert weight_bytes(model) == held, "the layers are views"


@pytest.mark.parametrize(
    ("family", "technique"), spread(MIXTURES, [Int8WeightOnly(), Int4WeightOnly()], by_default=2)
)
def test_a_mixture_computes_with_its_dequantized_weights(family: str, technique: Any) -> None:
    model, reference = mixture(family), mixture(family)
    experts = expert_places(reference)
    technique.modules(model, Notes())

    for place in checked_places(reference, "the reference"):
        quantized: Any = model.get_submodule(place.path)
        weight = place.layer.weight
        wide = quantized.widened(torch.float32)
        steps = 253 if technique.name == "int8_weight_only" else 7
        assert float((wide - weight).abs().max()) <= float(weight.abs().max()) / steps
        weight.copy_(wide)  # within transformers' own tensor
    assert experts
    assert any(weight.dim() > 2 for weight in reference.parameters()), (
        "the reference has transformers' modules"
    )
    assert_close(logits_after_prompt(model), logits_after_prompt(reference))


@pytest.mark.parametrize(
    "name", ["int8_weight_only", "int4_weight_only", "int8_dynamic", "int8_hybrid", "nf4", "llm_int8"]
)
def test_every_technique_says_what_share_it_covered(name: str) -> None:
    model = mixture("mixtral")
    sizes = {path: weight.numel() for path, weight in model.named_parameters()}
    left = ["norm", "mlp.gate.weight"]  # the router
    left += [] if name == "int8_hybrid" else ["embed_tokens"]
    left += ["lm_head"] if name in ("nf4", "llm_int8") else []
    floats = sum(size for path, size in sizes.items() if any(part in path for part in left))
    stack = resolve((TECHNIQUES[name](name=name),), "generate")
    applied = DecodingModel(model, stack, DeviceKind.CPU, seed=0, progress=ignore)
    assert applied.quantized == pytest.approx(1 - floats / sum(sizes.values()), abs=1e-9)
    assert applied.generate(prompt(), 3).tokens.shape == (2, 3)


def test_quantize_takes_a_mixture_to_its_target() -> None:
    model = mixture("mixtral")
    before = weight_bytes(model)
    technique, notes = TECHNIQUES["int8_hybrid"](name="int8_hybrid"), Notes()
    technique.modules(model, notes)
    share = weight_bytes(model) / before
    assert share < 0.28
    assert notes.facts["hybrid_share"] == pytest.approx(share, abs=1e-3)
    assert weight_bytes(quantize(mixture("mixtral"))) == weight_bytes(model)


def test_a_damaged_expert_is_refused_before_anything_is_changed() -> None:
    model = mixture("mixtral")
    experts = model.model.layers[0].mlp.experts
    experts.down_proj[2, 0, 0] = float("nan")
    with pytest.raises(UnsupportedError, match=r"experts\.down_proj\.2 has weights that are NaN"):
        Int8WeightOnly().modules(model, Notes())
    assert model.model.layers[0].mlp.experts is experts


# ---- What a memory target decides.


def candidate(path: str, stage: Stage, *sizes: int, sensitivity: float = 0.0) -> Candidate:
    """Levels of 4, 8 and 16 bits with these bytes."""
    levels = tuple(Level(f"kind {bits}", bits, size) for bits, size in zip((4, 8, 16), sizes, strict=False))
    return Candidate(path, levels, stage, sensitivity)


def bits_of(candidates: list[Candidate], budget: int) -> list[int]:
    return [decision.level.bits for decision in decide(candidates, budget)]


def test_what_is_left_goes_to_the_head_then_the_first_block_then_the_most_sensitive() -> None:
    candidates = [
        candidate("head", Stage.HEAD, 40, 80),
        candidate("h.0.a", Stage.FIRST_BLOCK, 10, 20, 40),
        candidate("h.1.a", Stage.REST, 10, 20, 40, sensitivity=1),
        candidate("h.2.a", Stage.REST, 10, 20, 40, sensitivity=2),
    ]
    assert least_bytes(candidates) == 70
    assert bits_of(candidates, 60) == [4, 4, 4, 4]  # the caller refuses a target that it cannot reach
    assert bits_of(candidates, 79) == [4, 4, 4, 4]
    assert bits_of(candidates, 80) == [4, 8, 4, 4]  # too little for the head, enough for what comes after it
    assert bits_of(candidates, 109) == [4, 16, 4, 4]
    assert bits_of(candidates, 110) == [8, 4, 4, 4]
    assert bits_of(candidates, 140) == [8, 16, 4, 4]
    assert bits_of(candidates, 150) == [8, 16, 4, 8]  # the more sensitive one
    assert bits_of(candidates, 160) == [8, 16, 8, 8]
    assert bits_of(candidates, 180) == [8, 16, 8, 16]
    assert bits_of(candidates, 10**6) == [8, 16, 16, 16]


def test_where_gains_are_known_the_step_that_gains_the_most_for_each_byte_comes_first() -> None:
    gains = {"a": (8.0, 1.0), "b": (3.0, 2.0)}
    candidates = [replace(candidate(path, Stage.REST, 10, 20, 40), gains=gains[path]) for path in gains]
    budgets = (29, 30, 40, 60, 80)
    assert [bits_of(candidates, budget) for budget in budgets] == [[4, 4], [8, 4], [8, 8], [8, 16], [16, 16]]
    rising = replace(candidates[0], gains=(1.0, 8.0))
    assert bits_of([rising], 40) == [16], "the last step gains more than the one before it"


def test_a_budget_is_kept_and_what_is_left_is_too_little_for_any_layer() -> None:
    drawn = random.Random(0)
    for _ in range(200):
        candidates = []
        for number in range(drawn.randint(1, 9)):
            size = drawn.randint(1, 50)
            stage = drawn.choice(list(Stage))
            candidates.append(candidate(f"h.{number}.a", stage, size, 2 * size, 4 * size))
        budget = drawn.randint(least_bytes(candidates), 4 * least_bytes(candidates))
        decisions = decide(candidates, budget)
        left = budget - total_bytes(decisions)
        assert left >= 0
        missing = [
            level.stored_bytes - decision.level.stored_bytes
            for one, decision in zip(candidates, decisions, strict=True)
            for level in one.levels
            if level.bits > decision.level.bits
        ]
        assert all(more > left for more in missing)
