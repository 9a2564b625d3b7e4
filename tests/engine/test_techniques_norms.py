"""fused_layernorm and fused_rmsnorm run one operator for each addition and norm, and change nothing that comes out."""

from typing import Any

import pytest
import torch

from optigpu.hardware import probe
from optigpu.ops.norm import fused_norm
from optigpu.techniques.base import Notes, Technique
from optigpu.techniques.compilation.torch_compile import TorchCompile
from optigpu.techniques.kernels.fused_gelu import FusedGelu
from optigpu.techniques.kernels.fused_layernorm import FusedLayernorm
from optigpu.techniques.kernels.fused_qkv import FusedQkv
from optigpu.techniques.kernels.fused_rmsnorm import FusedRmsnorm
from optigpu.techniques.kernels.fused_swiglu import FusedSwiglu
from optigpu.techniques.memory.static_kv_cache import StaticKvCache
from optigpu.techniques.quantization.int8_weight_only import Int8WeightOnly
from optigpu.vocabulary import DeviceKind
from tests.breadth import cases
from tests.engine.decoded import NEW_TOKENS, operators, operators_run
from tests.engine.rounding import (
    assert_greedy_as_far_as_it_can_be_told,
    in_float64,
    logits_of,
    rounding_bound,
)
from tests.engine.test_techniques_fused_layers import assert_refused_and_left
from tests.engine.test_techniques_quantization import quantize_in_place
from tests.engine.tiny_models import (
    LAYER_NORMED,
    RMS_NORMED,
    assert_needs_hook,
    normed_model,
    prompt,
    runtime_of,
)

pytestmark = pytest.mark.usefixtures("normed_models", "one_torch_thread")
LAYERS = 2
FUSED = {name: FusedLayernorm() for name in LAYER_NORMED} | {name: FusedRmsnorm() for name in RMS_NORMED}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYER_NORMED)
def test_fused_layernorm_runs_one_operator_for_each_addition_and_norm(name: str) -> None:
    plain = operators(name)

    def claim() -> None:
        fused = operators(name, FusedLayernorm())
        assert fused["optigpu::add_layer_norm"] == 2 * LAYERS * NEW_TOKENS
        assert fused["optigpu::layer_norm"] == NEW_TOKENS  # of the embedding, which nothing is added to
        assert plain["aten::native_layer_norm"] == (2 * LAYERS + 1) * NEW_TOKENS
        assert "aten::native_layer_norm" not in fused
        assert plain["aten::add"] - fused["aten::add"] == 2 * LAYERS * NEW_TOKENS

    assert_needs_hook(FusedLayernorm(), "modules", claim)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_fused_rmsnorm_runs_one_operator_for_each_addition_and_norm(name: str) -> None:
    plain = operators(name)
    of_heads = 2 * LAYERS if name == "qwen3" else 0  # it norms each head's query and key as well
    norms = 2 * LAYERS + 1 + of_heads

    def claim() -> None:
        fused = operators(name, FusedRmsnorm())
        assert fused["optigpu::add_rms_norm"] == 2 * LAYERS * NEW_TOKENS
        assert fused["optigpu::rms_norm"] == (1 + of_heads) * NEW_TOKENS
        for operator in ("aten::pow", "aten::mean", "aten::rsqrt"):
            assert plain[operator] == norms * NEW_TOKENS
            assert operator not in fused
        # The other additions that are gone add epsilon to a variance.
        assert plain["aten::add"] - fused["aten::add"] == (2 * LAYERS + norms) * NEW_TOKENS

    assert_needs_hook(FusedRmsnorm(), "modules", claim)


@pytest.mark.slow
@pytest.mark.parametrize("name", cases(dict.fromkeys(["opt", "llama", "qwen3", *FUSED]), 3))
def test_outputs_stay_what_they_were_and_what_was_fused_is_recorded(name: str) -> None:
    plain = runtime_of(f"path:{name}")
    reference = in_float64(plain.model)
    of_heads = 2 * LAYERS if name == "qwen3" else 0
    for others in ([], [StaticKvCache()]):
        fused = runtime_of(f"path:{name}", FUSED[name], *others)
        assert_as_right_as(plain, fused, reference)
        facts = fused.notes.facts
        assert facts["fused_norms"] == 2 * LAYERS + 1 + of_heads
        assert facts["fused_additions"] == 2 * LAYERS
        assert facts["norm_backend"] == fused_norm.norm_backend("cpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "others"),
    [("gpt2", [FusedGelu()]), ("qwen2", [FusedQkv(), FusedSwiglu()])],
)
def test_other_kernels_and_quantization_have_their_way_inside_the_blocks(
    name: str, others: list[Technique]
) -> None:
    plain = runtime_of(f"path:{name}")
    reference = in_float64(plain.model)
    for stack in ([FUSED[name], *others], [*others, FUSED[name]]):
        assert_as_right_as(plain, runtime_of(f"path:{name}", *stack), reference)
    quantize_in_place(reference)
    plain = runtime_of(f"path:{name}", *others, Int8WeightOnly())
    fused = runtime_of(f"path:{name}", *others, Int8WeightOnly(), FUSED[name])
    assert fused.notes.facts["int8_layers"] == plain.notes.facts["int8_layers"]
    assert_as_right_as(plain, fused, reference)


@pytest.mark.long
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_compiled_int8_step_is_one_graph_and_decodes_right(name: str) -> None:
    plain = runtime_of(f"path:{name}", Int8WeightOnly())
    fused = runtime_of(f"path:{name}", FUSED[name], Int8WeightOnly(), TorchCompile())
    reference = in_float64(runtime_of(f"path:{name}").model)
    quantize_in_place(reference)
    assert_as_right_as(plain, fused, reference, rows=2)
    assert fused.notes.facts["compiled_graphs"] == 1
    counts = operators_run(fused)
    operator = "optigpu::add_layer_norm" if name == "gpt2" else "optigpu::add_rms_norm"
    assert counts[operator] == 2 * LAYERS * NEW_TOKENS


@pytest.mark.parametrize("name", ["gpt2", "opt", "llama"])
def test_hidden_states_are_the_sums_as_ever(name: str) -> None:
    plain, fused = runtime_of(f"path:{name}"), runtime_of(f"path:{name}", FUSED[name])
    expected, states = (
        runtime.model(input_ids=prompt(), output_hidden_states=True).hidden_states
        for runtime in (plain, fused)
    )
    assert len(states) == len(expected) == LAYERS + 1
    # A sum of some hundred terms, each off by rounding: far less than a norm of it would be.
    assert all((one - other).abs().max() <= 1e-5 for one, other in zip(states, expected, strict=True))


@pytest.mark.parametrize("name", ["gpt2", "opt", "llama"])
def test_a_norm_is_used_for_the_very_sum_alone_that_it_is_of(name: str) -> None:
    """Code between two blocks may change the hidden states, or leave a block out."""

    def turn(block: Any, inputs: Any, output: Any) -> Any:
        return output.roll(1, dims=-1)

    plain, fused = runtime_of(f"path:{name}"), runtime_of(f"path:{name}", FUSED[name])
    bound = rounding_bound(in_float64(plain.model), prompt(), "float32")
    before = logits_of(fused.model, prompt())
    for runtime in (plain, fused):
        blocks_of(runtime.model)[0].register_forward_hook(turn)
    expected, changed = (logits_of(runtime.model, prompt()) for runtime in (plain, fused))
    assert float((changed - expected).abs().max()) <= 2 * bound
    assert float((changed - before).abs().max()) > 2 * bound


@pytest.mark.parametrize("name", ["gpt2", "opt", "llama"])
def test_a_model_in_training_has_its_gradients(name: str) -> None:
    plain, fused = (normed_model(name, **NO_DROPOUT.get(name, {})) for _ in range(2))
    FUSED[name].modules(fused, Notes())
    assert fused.state_dict().keys() == plain.state_dict().keys()
    for model in (plain, fused):
        model.train().requires_grad_(True)
        model(input_ids=prompt(), labels=prompt()).loss.backward()
    gradients = {path: parameter.grad for path, parameter in fused.named_parameters()}
    for path, parameter in plain.named_parameters():
        assert gradients[path].equal(parameter.grad)


def test_an_opt_without_a_final_norm_adds_by_itself_at_its_end() -> None:
    model = normed_model("opt", _remove_final_layer_norm=True)
    reference = in_float64(model)
    notes = Notes()
    FusedLayernorm().modules(model, notes)
    assert (notes.facts["fused_norms"], notes.facts["fused_additions"]) == (2 * LAYERS, 2 * LAYERS - 1)
    bound = rounding_bound(reference, prompt(), "float32")
    assert float((logits_of(model, prompt()) - logits_of(reference, prompt())).abs().max()) <= bound


@pytest.mark.parametrize(
    ("technique", "family", "changes", "sentence"),
    [
        (FusedRmsnorm(), "gpt2", {}, "gpt2 models have no RMSNorm; use fused_layernorm"),
        (FusedLayernorm(), "qwen2", {}, "qwen2 models have no LayerNorm; use fused_rmsnorm"),
        (FusedRmsnorm(), "gemma", {}, "supports the families llama, mistral, .*, not gemma"),
        (FusedLayernorm(), "opt", {"do_layer_norm_before": False}, "this OPT model has them after"),
        (FusedLayernorm(), "gpt2", {"add_cross_attention": True}, "cross-attention"),
    ],
)
def test_blocks_that_are_not_known_are_refused_and_left(
    technique: Technique, family: str, changes: dict[str, Any], sentence: str
) -> None:
    assert_refused_and_left(technique, normed_model(family, **changes), sentence)


def test_blocks_that_were_changed_before_are_refused_and_left() -> None:
    model = normed_model("llama")
    FusedRmsnorm().modules(model, Notes())
    assert_refused_and_left(FusedRmsnorm(), model, "blocks of the class LlamaDecoderLayer; this model's are ")
    assert_refused_and_left(FusedLayernorm(), normed_model("gpt2").transformer, "and this is a GPT2Model")


def test_what_can_be_said_before_a_model_is_loaded() -> None:
    environment = probe().model_copy(update={"compiler": "g++ 12"})
    facts = {name: runtime_of(f"path:{name}").facts for name in ("gpt2", "llama")}
    layer, rms = FusedLayernorm(), FusedRmsnorm()
    for device in DeviceKind:
        assert layer.check(environment, device, facts["gpt2"]) is None
        assert rms.check(environment, device, facts["llama"]) is None
        assert "no RMSNorm" in str(rms.check(environment, device, facts["gpt2"]))
        assert "no LayerNorm" in str(layer.check(environment, device, facts["llama"]))
        assert layer.check(environment, device, None) is None
    bare = environment.model_copy(update={"compiler": None})
    assert "install g++" in str(rms.check(bare, DeviceKind.CPU, None))
    assert rms.check(bare, DeviceKind.CUDA, None) is None


NO_DROPOUT = {
    "gpt2": {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "opt": {"dropout": 0.0, "attention_dropout": 0.0},
}


def assert_as_right_as(plain: Any, runtime: Any, reference: Any, rows: int = 16) -> None:
    """No further from float64 than twice as far as the plain model, and its tokens as far as that lets one tell.

    The largest error of some hundred logits varies by less than that from one order of the sums to another.
    """
    tokens = runtime.generate(prompt(rows), NEW_TOKENS).tokens
    assert tokens.shape == (rows, NEW_TOKENS)
    sequences = torch.cat([prompt(rows), tokens[:, :-1]], dim=1)
    exact = logits_of(reference, sequences)
    off, as_ever = (float((one.logits(sequences) - exact).abs().max()) for one in (runtime, plain))
    assert off <= 2 * as_ever
    assert_greedy_as_far_as_it_can_be_told(reference, prompt(rows), tokens, 2 * as_ever)


def blocks_of(model: Any) -> Any:
    base = model.transformer if hasattr(model, "transformer") else model.model
    return base.h if hasattr(base, "h") else getattr(base, "decoder", base).layers
