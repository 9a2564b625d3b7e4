"""The functions of the founding documents, called as those call them with small sizes, and QuantizedLinear."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck

from optigpu import (
    CachedTransformerDecoder,
    CheckpointedTransformerBlock,
    QuantizedLinear,
    benchmark_attention_implementations,
    benchmark_generation,
    benchmark_torch_compile,
    compare_checkpointing,
    compare_precisions,
    enable_gradient_checkpointing_hf,
    flash_attention_native,
    standard_attention,
    train_step_bf16,
    train_step_fp16,
    train_step_fp32,
    train_with_gradient_accumulation,
)
from optigpu.facade import quantized_linear
from optigpu.facade.quantized_linear import replace_linears
from optigpu.models.loading.footprint import weight_bytes
from optigpu.models.loading.load import load_image_model, load_model
from optigpu.models.reference import parse_reference
from optigpu.ops.four_bits.quantize import dequantize_groups, quantize_groups
from optigpu.ops.four_bits.scheme import Int4Scheme
from optigpu.surgery import integer_layers
from optigpu.vocabulary import OptiGPUError, UnsupportedError
from tests.engine.tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")


CRITERION = nn.CrossEntropyLoss()
IMAGES, LABELS = (
    torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0)),
    torch.tensor([1, 2, 3, 4]),
)


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))


def tiny_resnet() -> nn.Module:
    reference = parse_reference("preset:tiny-resnet-test")
    model: nn.Module = load_image_model(reference, device="cpu", dtype="float32")
    return model.requires_grad_(True)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


class TestTrainSteps:
    """One step, typed as the founding document has it."""

    def test_a_step_in_each_precision_lowers_the_loss_and_keeps_float32_weights(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", UserWarning)
            from torch.cuda.amp import GradScaler

            scaler = GradScaler()
        for step, further in ((train_step_fp32, ()), (train_step_fp16, (scaler,)), (train_step_bf16, ())):
            model = small()
            optimizer = optimizer_of(model)
            losses = [step(model, optimizer, IMAGES, LABELS, CRITERION, *further) for _ in range(5)]
            assert losses[-1] < losses[0]
            assert {weight.dtype for weight in model.parameters()} == {torch.float32}

    def test_a_loss_that_is_not_a_number_changes_no_weight(self) -> None:
        model = small()
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(OptiGPUError, match="The loss is nan; lower the learning rate"):
            train_step_fp32(model, optimizer_of(model), IMAGES * float("nan"), LABELS, CRITERION)
        assert all(before[name].equal(weight) for name, weight in model.state_dict().items())


class TestAccumulation:
    """Gradients of several batches in one update."""

    def test_an_update_is_that_of_the_whole_batch_also_where_batches_differ(self) -> None:
        one, several = small(), small()
        images, labels = torch.randn(7, 3, 8, 8), torch.randint(0, 10, (7,))
        train_with_gradient_accumulation(
            one, optimizer_of(one), [(images, labels)], CRITERION, 1, "cpu", precision="fp32"
        )
        loader = list(zip(images.split(3), labels.split(3), strict=True))
        (step,) = train_with_gradient_accumulation(
            several, optimizer_of(several), loader, CRITERION, 4, "cpu", precision="fp32"
        )
        assert (step["effective_batch"], step.step) == (7, 1)
        for ours, theirs in zip(one.parameters(), several.parameters(), strict=True):
            assert torch.allclose(ours, theirs, atol=1e-6)


@pytest.mark.slow
def test_precisions_are_compared_on_a_classifier_of_the_presets(capsys: pytest.CaptureFixture[str]) -> None:
    results = compare_precisions(model_fn=tiny_resnet, n_steps=3, batch_size=2, img_size=32, device="cpu")
    assert list(results) == ["FP32", "FP16", "BF16"]
    for row in results.values():
        assert row["vram_mb"] is None, "a CPU has none"
        assert row.throughput_imgs_s == pytest.approx(2000 / row.step_ms)
    assert "VRAM not measured" in capsys.readouterr().out
    with pytest.raises(KeyError, match="Did you mean step_ms"):
        results["FP32"]["step"]


class TestAttention:
    """standard_attention and flash_attention_native."""

    def test_both_compute_the_same_and_a_scale_can_be_given(self) -> None:
        q, k, v = torch.randn(3, 2, 4, 33, 16, dtype=torch.float64)
        expected = torch.softmax(q @ k.mT / 4, dim=-1) @ v
        assert torch.allclose(standard_attention(q, k, v), expected)
        assert torch.allclose(flash_attention_native(q, k, v), expected)
        assert torch.allclose(
            standard_attention(q, k, v, scale=0.0), v.mean(dim=2, keepdim=True).expand_as(v)
        )

    def test_memory_of_one_grows_with_the_square_of_the_length_and_of_the_other_with_the_length(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        first, second = benchmark_attention_implementations(
            batch_size=1, n_heads=2, seq_lengths=[256, 512], d_head=16, device="cpu", repeats=3
        )
        assert second.standard_mb / first.standard_mb > 3
        assert second.flash_mb / first.flash_mb < 2.5
        assert second["standard_mb"] > 2 * second["flash_mb"]  # type: ignore[operator]
        table = capsys.readouterr().out
        assert "Attention on this CPU in float32" in table
        assert len(table.splitlines()) == 4


class TestCheckpointing:
    """CheckpointedTransformerBlock and what it saves."""

    def test_gradients_are_those_of_the_block_that_keeps_everything(self) -> None:
        block = CheckpointedTransformerBlock(d_model=16, n_heads=2)
        plain = copy.deepcopy(block)
        plain.checkpointing = False
        x = torch.randn(2, 8, 16)
        for each in (block, plain):
            each(x).square().sum().backward()
        for ours, theirs in zip(block.parameters(), plain.parameters(), strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            assert torch.allclose(ours.grad, theirs.grad, atol=1e-6)

    @pytest.mark.slow
    def test_it_saves_memory_of_activations(self) -> None:
        results = compare_checkpointing(
            seq_len=128, batch_size=2, d_model=32, n_layers=6, n_heads=2, device="cpu", n_steps=2
        )
        without, with_ = results["without checkpointing"], results["with checkpointing"]
        assert with_.peak_mb < 0.7 * without.peak_mb
        assert without["vram_mb"] is None
        assert with_.step_ms > 0

    def test_transformers_models_are_told_to_checkpoint(self, capsys: pytest.CaptureFixture[str]) -> None:
        model = load_model(parse_reference("preset:tiny-gpt2-test"), device="cpu", dtype="float32")
        model.train().requires_grad_(True)
        calls: list[int] = []
        model.get_submodule("transformer.h.0.attn").register_forward_pre_hook(lambda *_: calls.append(1))
        ids = torch.zeros(1, 4, dtype=torch.int64)
        for expected in (1, 3):
            model(input_ids=ids, labels=ids).loss.backward()
            assert len(calls) == expected
            if expected == 1:
                enable_gradient_checkpointing_hf(model)
        assert model.config.use_cache is False
        assert capsys.readouterr().out == "Gradient checkpointing enabled on GPT2LMHeadModel\n"
        with pytest.raises(UnsupportedError, match="Sequential is no model of transformers"):
            enable_gradient_checkpointing_hf(small())  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_model_is_compiled_and_timed_beside_the_eager_one() -> None:
    rows = benchmark_torch_compile(small_conv, batch_size=2, img_size=8, n=3, device="cpu")
    assert [row.name for row in rows] == ["Eager (FP32)", "Compiled default", "BF16 + Compiled"]
    eager, compiled, _ = rows
    assert (eager.speedup, eager.compile_s) == (1.0, None)
    assert compiled.compile_s is not None
    assert compiled.compile_s * 1e3 > compiled.ms


def small_conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())


class TestCachedDecoder:
    """CachedTransformerDecoder and benchmark_generation."""

    @pytest.fixture
    def decoder(self) -> CachedTransformerDecoder:
        torch.manual_seed(0)
        return CachedTransformerDecoder(vocab_size=60, d_model=32, n_heads=4, n_layers=3).eval()

    @pytest.mark.parametrize("pieces", [[9], [5, 4], [4, 1, 1, 3], [1] * 9], ids=str)
    def test_a_cache_changes_no_logits_however_tokens_come(
        self, decoder: CachedTransformerDecoder, pieces: list[int]
    ) -> None:
        ids = torch.randint(60, (2, 9), generator=torch.Generator().manual_seed(1))
        whole, _ = decoder(ids)
        caches, found = None, []
        for piece in ids.split(pieces, dim=1):
            logits, caches = decoder(piece, caches)
            found.append(logits)
        assert torch.allclose(torch.cat(found, dim=1), whole, atol=1e-5)

    def test_the_first_new_token_comes_from_the_prompts_last_position(
        self, decoder: CachedTransformerDecoder
    ) -> None:
        prompt = torch.randint(60, (3, 7), generator=torch.Generator().manual_seed(2))
        tokens = decoder.generate(prompt, max_new_tokens=8, temperature=0)
        for _ in range(8):
            logits, _ = decoder(prompt)
            prompt = torch.cat([prompt, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
        assert tokens.equal(prompt[:, 7:])

    def test_a_seed_draws_the_same_tokens_again(self, decoder: CachedTransformerDecoder) -> None:
        first, again, other, greedy = (
            benchmark_generation(decoder, 60, 8, 12, "cpu", temperature, seed, repeats=2).tokens
            for temperature, seed in ((1.0, 0), (1.0, 0), (1.0, 1), (0.0, 0))
        )
        assert first.shape == (1, 12)
        assert first.equal(again)
        assert not first.equal(other)
        assert not first.equal(greedy)


GROUPS = [None, 32, 64]


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def quantized(inputs: int, outputs: int, group: int | None, bias: bool = True) -> Any:
    layer = QuantizedLinear(inputs, outputs, bias, group)
    layer.quantize_weights(drawn(outputs, inputs), drawn(outputs, seed=1) if bias else None)
    return layer


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("inputs", [128, 70, 9])
def test_weights_are_what_quantizing_by_groups_or_channels_leaves(inputs: int, group: int | None) -> None:
    layer, weights = quantized(inputs, 40, group), drawn(40, inputs)
    size = group or -(-inputs // 32) * 32
    padded = torch.nn.functional.pad(weights, (0, -inputs % size))
    expected = dequantize_groups(quantize_groups(padded, Int4Scheme(size)))
    assert layer.weight.equal(expected[:, :inputs])
    step = weights.abs().amax(dim=1, keepdim=True) / 8
    assert ((layer.weight - weights).abs() / step).mean() < 0.3  # evenly spread roundings: a quarter


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_it_computes_with_its_weights(dtype: torch.dtype, group: int | None) -> None:
    layer = quantized(96, 33, group)
    x = drawn(2, 5, 96, seed=2).to(dtype)
    exact = x.double() @ layer.weight.double().T + layer.bias.double()
    found = layer(x)
    assert found.dtype is dtype
    assert found.shape == (2, 5, 33)
    torch.testing.assert_close(
        found.double(), exact, rtol=0, atol=60 * torch.finfo(dtype).eps if dtype != torch.float64 else 1e-12
    )


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("inputs", [64, 20])
def test_gradients_are_those_of_finite_differences(inputs: int, group: int | None) -> None:
    layer = quantized(inputs, 7, group)
    x = drawn(3, inputs, seed=2).double().requires_grad_()
    bias = layer.bias.detach().double().requires_grad_()
    assert gradcheck(
        lambda x, bias: integer_layers.int4_product(_padded(x, layer), layer._packed(), bias), (x, bias)
    )
    layer.bias.data = layer.bias.data.double()
    assert gradcheck(layer, (x,))


def _padded(x: torch.Tensor, layer: Any) -> torch.Tensor:
    return torch.nn.functional.pad(x, (0, layer._padded - x.shape[-1]))


def test_gradients_reach_the_factors_of_lora() -> None:
    layer = quantized(32, 6, None)
    layer.bias.data = layer.bias.data.double()
    first, second = quantized(32, 32, 32, bias=False), layer

    def adapted(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
        """Two layers, so that the first's factors get their gradient through the second's weights."""
        hidden = torch.tanh(first(x) + x @ a @ b)
        return second(hidden)

    factors = [drawn(32, 2, seed=3), drawn(2, 32, seed=4)]
    assert gradcheck(adapted, [tensor.double().requires_grad_() for tensor in (drawn(2, 32), *factors)])


def test_gradients_of_the_frozen_weights_are_refused() -> None:
    layer = quantized(32, 4, None)
    loss = layer(drawn(2, 32).requires_grad_()).sum()
    for ask in (
        layer.requires_grad_,
        layer.weight.requires_grad_,
        lambda: layer.weight.grad,
        lambda: torch.autograd.grad(loss, layer.weight),
    ):
        with pytest.raises(UnsupportedError, match=r"frozen and have no gradient; .*LoRA"):
            ask()
    assert not layer.requires_grad_(False).bias.requires_grad
    assert type(layer.weight * 2) is torch.Tensor


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("inputs", [128, 70])
def test_a_state_dict_goes_round_in_every_layout(
    inputs: int, group: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, other = quantized(inputs, 40, group), QuantizedLinear(inputs, 40, group_size=group)
    kept = layer.state_dict()
    assert set(kept) == {"bias", "numbers", "scale"}
    assert kept["scale"].shape == (40, 1 if group is None else -(-inputs // group))
    other.load_state_dict(kept)
    x = drawn(3, inputs, seed=2)
    assert other(x).equal(layer(x))
    monkeypatch.setattr(quantized_linear, "int4_linear_backend", lambda *_: "torch-int4pack")
    plain = QuantizedLinear(inputs, 40, group_size=group)
    plain.load_state_dict(kept)
    assert plain.numbers is not None
    assert plain.numbers.dim() == 2
    torch.testing.assert_close(plain(x), layer(x), rtol=1e-5, atol=1e-5)
    assert all(plain.state_dict()[name].equal(kept[name]) for name in kept)


def test_a_model_keeps_its_tied_head_and_gives_the_rest_four_bits() -> None:
    plain, model = tiny_model("gpt2"), tiny_model("gpt2")
    assert replace_linears(model, group_size=32) is model
    kinds = {name for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}
    assert len(kinds) == 8
    assert model.lm_head.weight is model.transformer.wte.weight
    assert weight_bytes(model) < 0.45 * weight_bytes(plain)
    ids = torch.arange(12)[None]
    assert (model(ids).logits - plain(ids).logits).abs().mean() < 0.3 * plain(ids).logits.abs().mean()
