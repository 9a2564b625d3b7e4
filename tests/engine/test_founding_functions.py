"""The functions of the founding documents, called as those call them, with small sizes."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import optigpu
from optigpu import (
    CachedMultiHeadAttention,
    CachedTransformerDecoder,
    CheckpointedTransformerBlock,
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
from optigpu.facade.functions.timing import device_for, resnet_50
from optigpu.models.loading.load import load_image_model, load_model
from optigpu.models.reference import parse_reference
from optigpu.vocabulary import OptiGPUError, SpecError, UnsupportedError

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

    def test_precisions_compute_in_what_they_say(self) -> None:
        seen: list[torch.dtype] = []
        for step, further in (
            (train_step_fp32, ()),
            (train_step_fp16, (torch.amp.GradScaler("cpu"),)),
            (train_step_bf16, ()),
        ):
            model = small()
            model.register_forward_hook(lambda _, __, found: seen.append(found.dtype))
            step(model, optimizer_of(model), IMAGES, LABELS, CRITERION, *further)
        assert seen == [torch.float32, torch.float16, torch.bfloat16]

    def test_transformers_classifiers_train_too(self) -> None:
        model = tiny_resnet()
        loss = train_step_fp32(model, optimizer_of(model), torch.randn(2, 3, 32, 32), LABELS[:2], CRITERION)
        assert 0 < loss < 10

    def test_a_loss_that_is_not_a_number_changes_no_weight(self) -> None:
        model = small()
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(OptiGPUError, match="The loss is nan; lower the learning rate"):
            train_step_fp32(model, optimizer_of(model), IMAGES * float("nan"), LABELS, CRITERION)
        assert all(before[name].equal(weight) for name, weight in model.state_dict().items())

    def test_a_frozen_model_says_so(self) -> None:
        model = small().requires_grad_(False)
        with pytest.raises(OptiGPUError, match="all are frozen"):
            train_step_fp32(model, optimizer_of(model), IMAGES, LABELS, CRITERION)


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

    def test_what_is_left_at_the_end_is_trained_on(self, capsys: pytest.CaptureFixture[str]) -> None:
        model = small()
        loader = [(IMAGES, LABELS)] * 5
        steps = train_with_gradient_accumulation(
            model, optimizer_of(model), loader, CRITERION, accumulation_steps=2, device="cpu"
        )
        assert [each.effective_batch for each in steps] == [8, 8, 4]
        assert capsys.readouterr().out.startswith("Step 1 | Effective batch: 8 | Loss: ")

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"accumulation_steps": 0}, "less than 1"),
            ({"precision": "fp8"}, "the precisions are bf16 and fp32"),
        ],
    )
    def test_what_cannot_be_is_refused(self, changes: dict[str, Any], said: str) -> None:
        model = small()
        with pytest.raises(SpecError, match=said):
            train_with_gradient_accumulation(model, optimizer_of(model), [], CRITERION, **changes)


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


def test_the_default_image_model_is_one_of_our_presets() -> None:
    model = resnet_50()
    assert sum(each.numel() for each in model.parameters()) > 25e6
    assert all(each.requires_grad for each in model.parameters())


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

    def test_a_length_that_does_not_fit_is_refused(self) -> None:
        with pytest.raises(UnsupportedError, match="standard attention over 9000000 tokens"):
            benchmark_attention_implementations(64, 64, [9_000_000], 64, "cpu")


class TestDevices:
    """What `device` means."""

    def test_cuda_that_is_not_here_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert device_for(None) == torch.device("cpu")
        with pytest.raises(UnsupportedError, match="There is no CUDA device here; leave device out"):
            compare_checkpointing(device="cuda")

    def test_an_unknown_device_lists_the_known_ones(self) -> None:
        with pytest.raises(SpecError, match="the devices are cpu, cuda"):
            compare_precisions(device="tpu")


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

    def test_a_block_is_computed_again_in_the_backward_pass(self) -> None:
        counts = []
        for checkpointing in (True, False):
            block = CheckpointedTransformerBlock(16, 2, checkpointing)
            calls: list[int] = []
            block.ff.register_forward_hook(lambda *_, calls=calls: calls.append(1))
            block(torch.randn(2, 8, 16, requires_grad=True)).sum().backward()
            counts.append(len(calls))
        assert counts == [2, 1]

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

    def test_heads_must_divide_the_width(self) -> None:
        for make in (CheckpointedTransformerBlock, CachedMultiHeadAttention):
            with pytest.raises(SpecError, match="3 heads do not divide a width of 16"):
                make(16, 3)


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

    def test_torchs_random_state_stays_as_it_was(self, decoder: CachedTransformerDecoder) -> None:
        before = torch.random.get_rng_state()
        timing = benchmark_generation(decoder, vocab_size=60, seq_len=8, max_new=4, device="cpu")
        assert torch.equal(torch.random.get_rng_state(), before)
        assert timing.tokens_per_s == pytest.approx(4000 / timing.total_ms)

    def test_models_of_transformers_generate_as_many_tokens_as_asked_for(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        model = load_model(parse_reference("bundled:tiny"), device="cpu", dtype="float32")
        timing = benchmark_generation(model, 2048, 8, 20, "cpu", temperature=0.8, seed=1, repeats=1)
        assert timing["tokens"].shape == (1, 20)  # type: ignore[attr-defined]
        assert capsys.readouterr().out.startswith("With KV Cache on this CPU: ")

    def test_what_cannot_be_is_refused(self, decoder: CachedTransformerDecoder) -> None:
        with pytest.raises(SpecError, match="32000 is more than the 60 ids"):
            benchmark_generation(decoder, device="cpu")
        with pytest.raises(SpecError, match="temperature: -1 is not 0 or a positive number"):
            decoder.generate(torch.zeros(1, 1, dtype=torch.int64), temperature=-1)
        with pytest.raises(SpecError, match="there are 2048 positions"):
            decoder(torch.zeros(1, 2049, dtype=torch.int64))


def test_the_names_come_from_the_package() -> None:
    assert optigpu.standard_attention is standard_attention
