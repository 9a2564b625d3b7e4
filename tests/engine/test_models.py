"""Presets, loading, references that cannot be loaded; any decoder of transformers is measured or says why not."""

import copy
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from torch.nn import Embedding
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from transformers import AutoModelForCausalLM

from optigpu.backends.endpoint.prompts import tokenizer_of
from optigpu.backends.runtime import UnlikeWholeError
from optigpu.backends.torch import TorchBackend
from optigpu.backends.torch.runtime import TorchDecodingRuntime
from optigpu.child import replicate
from optigpu.documents.facts import ModelFacts
from optigpu.meters.base import MeterContext
from optigpu.meters.quality import QualityMeter, make_reference
from optigpu.models.described import facts_of, known_facts, packaged
from optigpu.models.held import CONFIGURATION, TOKENIZER, TOKENIZER_CONFIGURATION
from optigpu.models.loading.describing import description
from optigpu.models.loading.load import (
    MODELS_DIR,
    config_of,
    count_weights,
    load_image_model,
    load_model,
    load_tokenizer,
    loaded_image_facts,
    why_no_decoder,
)
from optigpu.models.reference import BUNDLED, IMAGE_PRESETS, PRESETS, parse_reference
from optigpu.techniques import TECHNIQUES
from optigpu.techniques.base import EXACT, Choice
from optigpu.vocabulary import UnsupportedError
from optigpu.workloads.base import Workload
from tests.breadth import cases
from tests.engine.causal_families import causal_families, causal_model, save
from tests.engine.measuring import in_process
from tests.engine.test_configuration_fields import ROTATIONS
from tests.engine.test_replicate import assignment
from tests.engine.tiny_models import VOCABULARY, ignore, prompt, tiny_model


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_published_number_of_weights(name: str) -> None:
    model = load_model(parse_reference(f"preset:{name}"), device="meta", dtype="bfloat16")
    assert count_weights(model) == PRESETS[name].parameters


@pytest.mark.parametrize(
    "reference", [*(f"preset:{name}" for name in PRESETS), *map("bundled:{}".format, BUNDLED)]
)
def test_what_is_known_of_a_model_without_loading_it_is_true(reference: str) -> None:
    """`python -m tools.describe_models` writes it again after a change of a preset or of transformers."""
    found = description(config_of(parse_reference(reference)))
    assert packaged()[reference] == found
    assert facts_of(parse_reference(reference)) == found.facts


@pytest.mark.slow
@pytest.mark.parametrize("name", IMAGE_PRESETS)
def test_an_image_preset_has_the_published_number_of_weights_and_facts(name: str) -> None:
    reference = parse_reference(f"preset:{name}")
    model = load_image_model(reference, device="meta", dtype="bfloat16")
    assert count_weights(model) == IMAGE_PRESETS[name].parameters
    assert loaded_image_facts(model) == known_facts(reference)
    assert facts_of(reference) is None, "what is asked of a decoder says nothing of it"


def test_weights_are_made_on_the_device_in_the_dtype_and_nowhere_else() -> None:
    made: set[tuple[str, torch.dtype]] = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.numel() > 10_000:
                made.add((result.device.type, result.dtype))
            return result

    with Watch():
        load_model(parse_reference("preset:tiny-llama-test"), device="meta", dtype="bfloat16")
    assert made == {("meta", torch.bfloat16)}


def test_a_seed_gives_the_same_weights_again_and_another_seed_others() -> None:
    first, again, other = (
        load_model(parse_reference("preset:tiny-llama-test"), device="cpu", dtype="float32", seed=seed)
        for seed in (1, 1, 2)
    )
    weight = "model.layers.0.mlp.up_proj.weight"
    assert first.get_parameter(weight).equal(again.get_parameter(weight))
    assert not first.get_parameter(weight).equal(other.get_parameter(weight))


def test_a_path_model_is_the_one_that_was_saved(models_dir: Path) -> None:
    saved = tiny_model("gpt2")
    loaded = load_model(parse_reference("path:gpt2"), device="cpu", dtype="float32")
    tokens = torch.arange(VOCABULARY)[None, :20]
    assert loaded(tokens).logits.equal(saved(tokens).logits)


def test_a_path_must_lie_under_the_model_directory(
    tmp_path: Path, models_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(models_dir / "gpt2")
    monkeypatch.setenv(MODELS_DIR, str(tmp_path))
    with pytest.raises(UnsupportedError, match="leads out of the model directory"):
        load_model(parse_reference("path:link"), device="cpu", dtype="float32")


def test_pickled_weights_are_never_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("gpt2")
    model.config.save_pretrained(tmp_path / "pickled")
    torch.save(model.state_dict(), tmp_path / "pickled" / "pytorch_model.bin")
    monkeypatch.setenv(MODELS_DIR, str(tmp_path))
    with pytest.raises(UnsupportedError, match="safetensors"):
        load_model(parse_reference("path:pickled"), device="cpu", dtype="float32")


@pytest.fixture
def damaged(tmp_path: Path, models_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a tiny Llama to damage, which `path:damaged` names; it has the tokenizer of bundled:tiny."""
    shutil.copytree(models_dir / "llama", tmp_path / "damaged")
    for name in (TOKENIZER, TOKENIZER_CONFIGURATION):
        shutil.copy(BUNDLED["tiny"] / name, tmp_path / "damaged")
    monkeypatch.setenv(MODELS_DIR, str(tmp_path))
    return tmp_path / "damaged"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "its configuration names 'spiral'"),
        ({"hidden_act": "sneeze"}, "its configuration names 'sneeze', which transformers does not know"),
        (
            {"num_attention_heads": 7},
            "The hidden size (64) is not a multiple of the number of attention heads (7)",
        ),
    ],
)
def test_what_transformers_cannot_make_of_a_configuration_is_one_sentence(
    damaged: Path, fields: dict[str, Any], said: str
) -> None:
    path = damaged / CONFIGURATION
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(UnsupportedError) as refused:
        load_model(parse_reference("path:damaged"), device="cpu", dtype="float32")
    sentence = str(refused.value)
    assert sentence.startswith("path:damaged cannot be loaded here: ")
    assert said in sentence
    assert sentence.endswith("; check its config.json.")
    assert "\n" not in sentence


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        (TOKENIZER, "{", f"{TOKENIZER} of path:damaged is not JSON: "),
        (TOKENIZER, "{}", "path:damaged cannot be loaded here: "),
        (TOKENIZER_CONFIGURATION, "[]", f"{TOKENIZER_CONFIGURATION} of path:damaged holds no JSON object"),
    ],
)
def test_a_damaged_tokenizer_is_one_sentence(damaged: Path, file: str, content: str, said: str) -> None:
    load_tokenizer(parse_reference("path:damaged"))
    (damaged / file).write_text(content)
    with pytest.raises(UnsupportedError) as refused:
        load_tokenizer(parse_reference("path:damaged"))
    assert str(refused.value).startswith(said)
    assert "\n" not in str(refused.value)
    if file == TOKENIZER:
        with pytest.raises(UnsupportedError, match=f"^{TOKENIZER} of path:damaged "):
            tokenizer_of(parse_reference("path:damaged"))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("nobody/nothing@main", ""),
        ("gpt2", "; preset:gpt2 has its shapes, random weights, and needs no network"),
    ],
)
def test_a_hub_that_cannot_be_reached_is_one_clear_sentence(
    name: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(UnsupportedError) as caught:
        load_model(parse_reference(f"hub:{name}"), device="cpu", dtype="float32")
    assert str(caught.value).startswith(
        f"hub:{name} cannot be loaded here: its files are not all in the hub's cache, and the hub "
        "http://127.0.0.1:1 cannot be reached: "
    )
    assert str(caught.value).endswith(f"{hint}; or put it under {MODELS_DIR} and name it path:DIR.")
    assert "\n" not in str(caught.value)


TYPES = (
    "llama", "llama4_text", "mistral", "ministral", "ministral3", "mixtral", "qwen2", "qwen2_moe", "qwen3",
    "qwen3_moe", "qwen3_next", "qwen3_5_text", "gemma", "gemma2", "gemma3_text", "gemma3", "gemma3n_text",
    "gemma4_text", "phi", "phi3", "phimoe", "smollm3", "olmo", "olmo2", "olmo3", "olmoe", "granite",
    "granitemoe", "granitemoehybrid", "deepseek_v2", "deepseek_v3", "glm", "glm4", "glm4_moe", "gpt_oss",
    "falcon", "falcon_mamba", "mamba", "mamba2", "jamba", "rwkv", "bloom", "gptj", "gpt_neox",
    "gpt_bigcode", "gpt_neo", "starcoder2", "stablelm", "cohere", "cohere2", "nemotron", "minicpm3",
    "ernie4_5", "ernie4_5_moe", "hunyuan_v1_dense", "hunyuan_v1_moe", "exaone4", "lfm2", "bitnet", "xglm",
    "codegen", "mpt", "persimmon", "opt", "gpt2", "seed_oss", "diffllama", "minimax", "cpmant",
    "openai-gpt", "recurrent_gemma", "dbrx", "zamba2", "whisper",
)  # fmt: skip
CHEAP = ("int8_weight_only", "int4_weight_only", "int8_hybrid", "static_kv_cache", "fused_attention")
OTHERS = (
    "int8_dynamic",
    "nf4",
    "llm_int8",
    "torch_compile",
    "no_kv_cache",
    "int8_kv_cache",
    "eager_attention",
)
QUICK = [(family, number, (CHEAP[number % len(CHEAP)],)) for number, family in enumerate(TYPES)]
FOUND = {"minimax": "eager_attention", "cpmant": "int4_weight_only", "openai-gpt": "int8_kv_cache"}
"""What ended in an error once."""
QUICK += [(family, 0, (name,)) for family, name in FOUND.items()]
EVERY = [(family, number, (*CHEAP, *OTHERS)) for number, family in enumerate(causal_families())]
ODD: list[tuple[str, dict[str, Any]]] = [
    ("gemma2", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 2.0, "sliding_window": 4}),
    ("gpt_oss", {"sliding_window": 4}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    *(("llama", {"rope_parameters": each, "head_dim": 16}) for each in ROTATIONS),
]
"""Soft caps, sinks, a window in some layers, and each kind of rotation."""
WORKLOAD = {"kind": "generate", "prompt_tokens": 5, "new_tokens": 3}
TOKENS = 24
"""Of the text that quality is measured on."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_torch_thread: None) -> Iterator[Path]:
    """Of models, and of a job."""
    monkeypatch.setenv(MODELS_DIR, str(tmp_path))
    with in_process():  # sets the threads back
        yield tmp_path


@dataclass(frozen=True)
class Measured:
    """A variant whose request has passed its check."""

    runtime: TorchDecodingRuntime
    context: MeterContext


def measured(folder: Path, family: str, *stack: str | dict[str, Any]) -> Measured:
    """As a replicate prepares it, without a warm-up. Raises UnsupportedError as it does."""
    work = assignment(WORKLOAD, f"path:{family}", *stack).model_copy(update={"folder": str(folder)})
    if reason := replicate.refusal(work):
        raise UnsupportedError(reason)
    workload: Workload = work.variant.workload
    quality = work.measure.quality.model_copy(update={"tokens": TOKENS})
    runtime = TorchBackend().prepare(replicate.order_of(work), ignore)
    assert isinstance(runtime, TorchDecodingRuntime)
    if reason := workload.check(runtime.facts):
        raise UnsupportedError(reason)
    request = workload.prepare(runtime)
    assert request.check().problem is None
    context = MeterContext(runtime, request, workload, work.variant.model, folder, work.seed, quality)
    return Measured(runtime, context)


def require_sentence(text: str) -> None:
    assert re.fullmatch(r"[^\n]{10,400}\.", text), text
    assert not re.search(r"\w(Error|Exception)\b|Traceback|failed", text), text


class Multiplied(TorchDispatchMode):
    """Counts the operations of products of a pass: those in which a factor lies in a parameter, and the others."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.with_weights = self.without = 0
        self.places = {each.untyped_storage().data_ptr() for each in model.parameters()}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        formula = flop_registry.get(function.overloadpacket)
        if formula:
            flops = formula(*args, **(kwargs or {}), out_val=result)
            given = [each for each in args if isinstance(each, torch.Tensor)]
            if any(each.untyped_storage().data_ptr() in self.places for each in given[-2:]):
                self.with_weights += flops
            else:
                self.without += flops
        return result


UNCOUNTED = ("dbrx", "jetmoe", "moshi", "deepseek_v4")
"""Families whose operations are not known."""
IN_BLOCKS = {"minimax": 2}
"""Families of which some layers multiply all pairs within blocks of 256 tokens, though they attend to a state: by how
much products grow faster with the square of a short text."""


def require_operations(family: str, facts: ModelFacts, config: Any) -> None:
    """Those of passes over texts with real numbers, in which each expert multiplies the tokens that chose it: of
    products with weights within 1%, and of attention, which grows with the square of a text."""
    if facts.work is None:
        require_sentence(str(facts.uncounted))
        assert family in UNCOUNTED
        return
    ways = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), **ways).eval()
    passes = []
    for length in (17, 18, 19):
        with torch.no_grad(), Multiplied(model) as counted:
            model(input_ids=prompt(1, length), use_cache=False)
        passes.append(counted)
    few, more, most = passes
    assert facts.work.flops + facts.work.head_flops == pytest.approx(
        most.with_weights - more.with_weights, rel=0.01
    )
    head = model.get_output_embeddings()
    assert head is None or 0 <= facts.work.head_flops - 2 * head.weight.numel() < 0.1 * facts.work.flops
    pairs = (few.without - 2 * more.without + most.without) // 2
    attention = sum(layers.flops for layers in facts.work.attention)
    assert attention * IN_BLOCKS.get(family, 1) == pairs


def require_counted(runtime: TorchDecodingRuntime) -> None:
    """Parameters and bytes are those of a plain loop over modules."""
    weights, footprint, model = runtime.weights(), runtime.footprint(), runtime.decoding.model
    numbers: dict[int, int] = {}
    held: dict[int, int] = {}
    streamed: dict[int, int] = {}
    rows: dict[int, int] = {}
    text = model.get_decoder() if model.config.get_text_config(decoder=True) is not model.config else model
    parts = {*text.modules(), model.get_output_embeddings(), model.get_input_embeddings()}
    for module in model.modules():
        own = [*module._parameters.values(), *module._buffers.values()]
        for tensor in (each for each in own if each is not None):
            held[tensor.data_ptr()] = tensor.nbytes
            if isinstance(tensor, torch.nn.Parameter):
                numbers[tensor.data_ptr()] = tensor.numel()
            if module in parts and isinstance(module, Embedding):
                rows[tensor.data_ptr()] = tensor[0].nbytes if tensor.dim() else 0
            elif module in parts:
                streamed[tensor.data_ptr()] = tensor.nbytes
    assert weights.parameters == sum(numbers.values())
    assert weights.bytes == sum(held.values())
    assert footprint.streamed_bytes == sum(streamed.values())
    assert footprint.row_bytes == sum(size for place, size in rows.items() if place not in streamed)


def require_quality(context: MeterContext, most: float) -> None:
    """A divergence of at most `most`, or one sentence for each figure that is missing."""
    found = QualityMeter().read(context)
    for reason in found.reasons.values():
        require_sentence(reason)
    if "kld_mean" in found.values:
        assert 0 <= found.values["kld_mean"] <= most
        if most <= EXACT:
            assert found.values["top1_agreement"] == 1


def measured_or_told(folder: Path, family: str, *stack: str) -> Measured | None:
    """None where one sentence says why it is not measured."""
    try:
        return measured(folder, family, *stack)
    except UnsupportedError as error:
        require_sentence(str(error))
        return None


def require_measured(folder: Path, family: str, number: int, names: tuple[str, ...], **fields: Any) -> None:
    """The plain model, and with each of the techniques that can be applied."""
    model = causal_model(family, number, **fields)
    save(model, folder / family, number)
    plain = measured_or_told(folder, family)
    if plain is None:
        assert why_no_decoder(model.config)
        return
    require_counted(plain.runtime)
    require_operations(family, plain.runtime.footprint().facts, model.config)
    plain.context.request.observe()
    assert not make_reference(plain.context).reasons
    require_quality(plain.context, 1e-8)
    for name in names:
        technique = TECHNIQUES[name](name=name)
        changed = measured_or_told(folder, family, name)
        if changed is None:
            continue
        require_quality(changed.context, 1e-6 if technique.keeps_predictions() else 4.0)
        if Choice.WEIGHTS in technique.chosen():
            assert 0.5 < (changed.runtime.weights().quantized or 0) <= 1


@pytest.mark.slow
@pytest.mark.parametrize(("family", "number", "names"), QUICK, ids=[case[0] for case in QUICK])
def test_a_decoder_is_measured(folder: Path, family: str, number: int, names: tuple[str, ...]) -> None:
    require_measured(folder, family, number, names)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "fields"), cases(ODD, by_default=1))
def test_an_odd_decoder_is_measured(folder: Path, family: str, fields: dict[str, Any]) -> None:
    require_measured(folder, family, 0, (*CHEAP, "int8_kv_cache", "no_kv_cache"), **fields)


def test_what_looks_ahead_is_predicted_by_what_came_before(folder: Path) -> None:
    save(causal_model("bert-generation"), folder / "bert-generation")
    runtime, tokens = measured(folder, "bert-generation").runtime, prompt(1, 8).numpy()
    with pytest.raises(UnlikeWholeError, match="predict a token by those behind it as well"):
        next(runtime.score(tokens, 5))
    assert (next(runtime.whole(tokens, 5)) == next(runtime.whole(tokens[:, :6], 5))).all()


def test_a_request_behind_the_context_of_config_json_is_one_sentence(folder: Path) -> None:
    save(causal_model("llama", max_position_embeddings=4), folder / "llama")
    with pytest.raises(UnsupportedError) as refused:
        measured(folder, "llama")
    require_sentence(str(refused.value))


@pytest.mark.slow
@pytest.mark.parametrize("name", cases(["", "static_kv_cache", *CHEAP, *OTHERS]))
def test_weights_that_are_nan_are_told(folder: Path, name: str) -> None:
    model = causal_model("llama")
    model.model.layers[0].mlp.up_proj.weight[0, 0] = torch.nan
    save(model, folder / "llama")
    with pytest.raises((UnsupportedError, AssertionError), match="NaN or infinite"):
        measured(folder, "llama", *filter(None, [name]))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_a_compiled_step_goes_on_beyond_a_window(folder: Path, family: str) -> None:
    model = causal_model(family)
    model.config.sliding_window = 4
    save(model, folder / family)
    assert not make_reference(measured(folder, family).context).reasons
    compiled = measured(folder, family, {"name": "torch_compile", "backend": "eager"})
    require_quality(compiled.context, 1e-6)


@pytest.mark.long
@pytest.mark.parametrize(("family", "number", "names"), EVERY, ids=[case[0] for case in EVERY])
def test_every_decoder_is_measured_with_every_technique(
    folder: Path, family: str, number: int, names: tuple[str, ...]
) -> None:
    require_measured(folder, family, number, names)
