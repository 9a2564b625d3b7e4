"""accelerate, the optimizers and quantize do to a caller's loaded model what the techniques do."""

from mmap import mmap
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, ViTConfig, ViTForImageClassification

from optigpu import (
    CompileOptimizer,
    MemoryOptimizer,
    QuantizationOptimizer,
    accelerate,
    make_it_work_hybrid,
    quantize,
)
from optigpu.backends.torch.applied import DecodingModel
from optigpu.facade import quantized
from optigpu.job.spec import resolve
from optigpu.models.loading.footprint import weight_bytes
from optigpu.models.reference import BUNDLED
from optigpu.surgery.bitsandbytes_layers import Nf4Linear
from optigpu.surgery.integer_layers import Int4Linear, Int8Linear
from optigpu.surgery.places import linear_places
from optigpu.techniques.decoding.native_decode.generating import NativeGenerate
from optigpu.techniques.decoding.native_decode.programs import attached
from optigpu.techniques.quantization.int8_weight_only import Int8WeightOnly
from optigpu.vocabulary import DeviceKind, SpecError, UnsupportedError
from tests.engine.sessions import BRIEF
from tests.engine.tiny_models import ignore, tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_torch_thread", "forked_children")]
PROMPT = "The future of AI is"
NEW = 24


def trained() -> Any:
    model = AutoModelForCausalLM.from_pretrained(BUNDLED["tiny"])
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    found = AutoTokenizer.from_pretrained(BUNDLED["tiny"], padding_side="left")
    found.pad_token = found.eos_token
    return found


@pytest.fixture(scope="module")
def plain() -> Any:
    return trained()


@pytest.fixture(scope="module")
def fast() -> Any:
    return accelerate(trained())


@pytest.fixture(scope="module")
def greedy(plain: Any, tokenizer: Any) -> list[int]:
    """The float model's new tokens after PROMPT."""
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    found: list[int] = plain.generate(ids, max_new_tokens=NEW)[0, ids.shape[1] :].tolist()
    return found


def test_the_text_is_the_float_models(fast: Any, tokenizer: Any, greedy: list[int]) -> None:
    prompt = tokenizer(PROMPT, return_tensors="pt")
    tokens = fast.generate(**prompt, max_new_tokens=NEW)
    length = prompt["input_ids"].shape[1]
    assert tokens[:, :length].equal(prompt["input_ids"])
    assert tokens[0, length:].tolist() == greedy
    assert isinstance(fast, NativeGenerate)


@pytest.mark.parametrize("options", [{"max_length": 30}, {"max_new_tokens": 9}, {}], ids=str)
def test_lengths_are_as_asked(plain: Any, fast: Any, options: dict[str, int]) -> None:
    prompt = torch.tensor([[5, 6, 7]])
    assert fast.generate(prompt, **options).shape == plain.generate(prompt, **options).shape


def test_a_sequence_ends_at_an_end_token(plain: Any, fast: Any, tokenizer: Any, greedy: list[int]) -> None:
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    end = greedy[18]  # after the first chunk of the decoder's tokens
    asked = {"max_new_tokens": NEW, "eos_token_id": end, "pad_token_id": 0}
    assert fast.generate(ids, **asked).equal(plain.generate(ids, **asked))
    both = tokenizer([PROMPT, "Once upon a time there was"], return_tensors="pt", padding=True)
    assert fast.generate(**both, **asked).equal(plain.generate(**both, **asked))


class Kept:
    """A streamer that keeps what it gets."""

    def __init__(self) -> None:
        self.parts: list[list[int]] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.parts.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended = True


def test_a_streamer_gets_the_prompt_and_each_token(fast: Any, tokenizer: Any, greedy: list[int]) -> None:
    ids, kept = tokenizer(PROMPT, return_tensors="pt")["input_ids"], Kept()
    fast.generate(ids, max_new_tokens=NEW, streamer=kept)
    assert kept.parts == [ids[0].tolist(), *([token] for token in greedy)]
    assert kept.ended


def test_a_stop_string_ends_the_text(plain: Any, fast: Any, tokenizer: Any, greedy: list[int]) -> None:
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    stop = tokenizer.decode(greedy[4:6])
    asked = {"max_new_tokens": NEW, "stop_strings": [stop], "tokenizer": tokenizer}
    found = fast.generate(ids, **asked)
    assert found.equal(plain.generate(ids, **asked))
    assert ids.shape[1] < found.shape[1] < ids.shape[1] + NEW


def test_a_text_beyond_the_context_is_left_to_transformers(fast: Any) -> None:
    context = attached(fast).context
    prompt = torch.full((1, context - 1), 5)
    assert fast.generate(prompt, max_new_tokens=2).shape == (1, context + 1)
    with pytest.warns(UserWarning, match="beyond the model's context"), pytest.raises(IndexError):
        fast.generate(prompt, max_new_tokens=3)


def test_a_model_beyond_the_last_cache_gets_bits_within_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "last_level_cache_bytes", lambda: 1000)

    def kinds(model: Any) -> set[str]:
        program = attached(model)
        return {program.head.kind, *(block.output.kind for block in program.blocks)}

    assert kinds(accelerate(tiny_model("gpt2"))) <= {"w3k", "w4k", "w5", "w6", "w8"}
    assert kinds(accelerate(tiny_model("gpt2"), weights="w8")) == {"w8"}


def test_what_cannot_be_accelerated_says_so(fast: Any) -> None:
    with pytest.raises(SpecError, match="accelerated already"):
        accelerate(fast)
    with pytest.raises(SpecError, match=r"weights: .*w3"):
        accelerate(tiny_model("gpt2"), weights="w3")  # type: ignore[arg-type]
    images = ViTForImageClassification(ViTConfig(hidden_size=32, num_hidden_layers=1))
    with pytest.raises(UnsupportedError, match="not ViTForImageClassification"):
        accelerate(images)


LLAMA = "preset:tiny-llama-test"
IDS = torch.arange(6)[None]


def loaded(precision: str) -> Any:
    return QuantizationOptimizer.load(LLAMA, precision=precision, device="cpu")[0]


@pytest.mark.parametrize(
    ("precision", "layer"), [("int8", Int8Linear), ("int4", Int4Linear), ("nf4", Nf4Linear)]
)
def test_a_quantized_precision_replaces_the_layers_and_generates(precision: str, layer: type) -> None:
    model = loaded(precision)
    assert sum(isinstance(module, layer) for module in model.modules()) >= 14
    assert model.generate(IDS, max_new_tokens=4, do_sample=False).shape == (1, 10)


def test_it_is_the_model_that_a_job_measures() -> None:
    measured = DecodingModel(LLAMA, resolve([Int8WeightOnly()], "generate"), DeviceKind.CPU, 0, ignore).model
    with torch.no_grad():
        assert torch.equal(loaded("int8")(IDS).logits, measured(IDS).logits)


def test_a_preset_has_no_tokenizer_and_a_trained_model_has() -> None:
    assert QuantizationOptimizer.load(LLAMA, precision="fp32", device="cpu")[1] is None
    _, tokenizer = QuantizationOptimizer.load("bundled:tiny", precision="fp32", device="cpu")
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer.encode("Once upon")) == "Once upon"


def test_what_cannot_be_loaded_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(SpecError, match=r"There is no precision 'int6'.*The precisions are fp32, .*native\."):
        loaded("int6")
    with pytest.raises(SpecError, match="no device 'tpu'"):
        QuantizationOptimizer.load(LLAMA, precision="fp32", device="tpu")
    with pytest.raises(UnsupportedError, match="gptqmodel"):
        loaded("gptq")
    with pytest.raises(
        UnsupportedError, match="preset:gpt2 has its shapes, random weights, and needs no network"
    ):
        QuantizationOptimizer.load("gpt2", precision="fp32", device="cpu")


def test_memory_is_printed_after_its_label(capsys: pytest.CaptureFixture[str]) -> None:
    MemoryOptimizer.print_stats("before")
    assert capsys.readouterr().out.startswith("before: host ")
    with mmap(-1, 2**27) as held:  # what an allocator frees may stay with it
        held[::4096] = bytes([1]) * (len(held) // 4096)
        before = MemoryOptimizer.stats().host_bytes
    assert before - MemoryOptimizer.stats().host_bytes > 2**26


def test_optimized_inference_is_what_the_techniques_run_under() -> None:
    layer = nn.Linear(4, 2)
    with MemoryOptimizer.optimized_inference(device="cpu"):
        assert layer(torch.zeros(1, 4)).is_inference()
    with MemoryOptimizer.optimized_inference(device="cpu", autocast="bfloat16"):
        made = layer(torch.zeros(1, 4))
    assert (made.dtype, made.requires_grad, made.is_inference()) == (torch.bfloat16, False, False)
    assert layer(torch.zeros(1, 4)).requires_grad


def test_what_is_compiled_runs_as_a_graph_and_generate_runs_it_too() -> None:
    graphs: list[torch.fx.GraphModule] = []
    model = loaded("fp32")
    expected = model.generate(IDS, max_new_tokens=2, do_sample=False)

    @torch._dynamo.register_backend(name="noted_by_this_test")
    def noted(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    assert CompileOptimizer.compile(model, mode="reduce-overhead") is model
    model.compile(backend="noted_by_this_test")  # as CompileOptimizer does, with what notes each graph
    assert torch.equal(model.generate(IDS, max_new_tokens=2, do_sample=False), expected)
    assert graphs


@pytest.mark.long
@pytest.mark.usefixtures("own_lock")
def test_compiling_is_measured_beside_eager(capsys: pytest.CaptureFixture[str]) -> None:
    report = CompileOptimizer.benchmark("preset:tiny-vit-test", backend="eager", device="cpu", **BRIEF)
    assert [row.label for row in report.rows] == ["baseline", "torch_compile"]
    assert "torch_compile" in capsys.readouterr().out


SAMPLES = torch.arange(40).view(4, 10)


def trained_in_float32() -> Any:
    return AutoModelForCausalLM.from_pretrained(BUNDLED["tiny"], dtype="float32")


def test_one_line_leaves_a_quarter_of_the_bytes_and_the_greedy_text() -> None:
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED["tiny"])
    ids = tokenizer("The future of AI is", return_tensors="pt")["input_ids"]
    model, asked = trained_in_float32(), {"max_new_tokens": 24, "pad_token_id": 0}
    before, expected = weight_bytes(model), model.generate(ids, **asked)
    found: Any = quantize(model)
    assert found is model
    assert weight_bytes(model) < 0.27 * before
    assert model.generate(ids, **asked).equal(expected)


def test_four_bits_and_a_target_are_the_techniques() -> None:
    model: Any = quantize(tiny_model("llama"), bits=4)
    assert isinstance(model.model.layers[1].mlp.down_proj, Int4Linear)
    plain = tiny_model("llama")
    assert weight_bytes(quantize(tiny_model("llama"), memory_target=0.5)) <= 0.5 * weight_bytes(plain)


@pytest.mark.parametrize(
    ("asked", "error", "said"),
    [
        ({"sample_inputs": "a text"}, SpecError, "sample_inputs must be token ids.*not str"),
        ({"sample_inputs": []}, SpecError, "sample_inputs is empty"),
        ({"sample_inputs": SAMPLES + 90}, SpecError, "sample_inputs: Token id 129 of sample_inputs"),
        ({"smoothing_alpha": 2.0}, SpecError, "smoothing: 2 is too large; the most is 1"),
        ({"memory_target": 0.0}, SpecError, "memory_target: 0 is too small"),
        ({"memory_target": 0.01, "quantize_embeddings": False}, UnsupportedError, "quantize the embeddings"),
        ({"bits": 3}, SpecError, "bits: "),
    ],
)
def test_what_cannot_be_says_why_and_leaves_the_model(
    asked: dict[str, Any], error: type[Exception], said: str
) -> None:
    model = tiny_model("gpt2")
    with pytest.raises(error, match=said):
        make_it_work_hybrid(model, **asked)
    assert len(linear_places(model)) == len(linear_places(tiny_model("gpt2")))


def test_a_model_is_quantized_once() -> None:
    with pytest.raises(UnsupportedError, match="quantized already"):
        quantize(quantize(tiny_model("gpt2")))
