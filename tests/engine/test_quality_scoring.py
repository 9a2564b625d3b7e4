"""Quality goes through what was timed: its step, its cache, its graph, its loop."""

from pathlib import Path

import pytest

from optigpu.backends.torch.applied import DecodingModel
from optigpu.job.spec import resolve
from optigpu.meters.quality import QualityMeter, make_reference
from optigpu.techniques.base import Technique
from optigpu.techniques.compilation.torch_compile import TorchCompile
from optigpu.techniques.memory.no_kv_cache import NoKvCache
from optigpu.techniques.memory.static_kv_cache import StaticKvCache
from optigpu.techniques.quantization.int8_weight_only import Int8WeightOnly
from optigpu.vocabulary import DeviceKind
from tests.breadth import spread
from tests.engine.quality_contexts import (
    LENGTH,
    MODEL,
    VOCABULARY,
    OwnLoop,
    Spy,
    assert_nothing,
    context,
    context_of,
    exact_model,
    measured,
)
from tests.engine.tiny_models import ignore, runtime_of

pytestmark = pytest.mark.usefixtures("trained_model")


@pytest.mark.slow
def test_forced_tokens_go_through_the_timed_step_and_its_own_cache(tmp_path: Path) -> None:
    import torch

    runtime = runtime_of(MODEL, Spy(), StaticKvCache())
    runtime.generate(torch.zeros((2, 24), dtype=torch.int64), 40)
    cache = runtime.notes.facts["seen"][0][2]
    runtime.notes.record(seen=[])
    tokens = torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    logits = list(runtime.score(tokens, 5))
    assert runtime.notes.facts["seen"] == [
        (tokens[:, index].tolist(), index, cache) for index in range(5, LENGTH)
    ]
    assert [tuple(row.shape) for row in logits] == [(2, VOCABULARY)] * (LENGTH - 5)


@pytest.mark.parametrize(
    ("stack", "prefill"),
    spread(
        [((),), ((StaticKvCache(),),), ((NoKvCache(),),), ((Spy(),),), ((Spy(), StaticKvCache()),)],
        [0, 1, 9],
        by_default=5,
    ),
)
def test_scores_are_the_logits_after_each_forced_token(stack: tuple[Technique, ...], prefill: int) -> None:
    import torch

    tokens = torch.randint(VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = exact_model()(input_ids=tokens).logits
    found = list(runtime_of(MODEL, *stack).score(tokens, prefill))
    assert len(found) == 12 - prefill
    assert all(
        float((row - expected[:, prefill + index]).abs().max()) < 1e-3 for index, row in enumerate(found)
    )
    assert not torch.is_inference_mode_enabled()


def test_whole_passes_serve_few_positions_at_a_time_where_logits_are_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    runtime = runtime_of(MODEL)
    tokens = torch.randint(VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(0))
    at_once = list(runtime.whole(tokens, 3))
    monkeypatch.setattr("optigpu.backends.torch.decoding.LOGITS_A_PASS", 2 * VOCABULARY * 2)
    lengths: list[int] = []
    handle = runtime.model.register_forward_pre_hook(
        lambda _, __, named: lengths.append(named["input_ids"].shape[1]), with_kwargs=True
    )
    few = list(runtime.whole(tokens, 3))
    handle.remove()
    assert lengths == [5, 7, 9, 11, 12]
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(at_once, few, strict=True))


@pytest.mark.slow
def test_a_compiled_step_is_scored_by_the_graph_that_was_timed(tmp_path: Path) -> None:
    from torch._dynamo.utils import counters

    make_reference(context(tmp_path))
    compiled = context(tmp_path, TorchCompile(backend="eager"), Int8WeightOnly())
    graphs = counters["stats"]["unique_graphs"]
    reading = QualityMeter().read(compiled)
    plain = QualityMeter().read(context(tmp_path, Int8WeightOnly()))
    assert counters["stats"]["unique_graphs"] == graphs
    assert reading.values["kld_mean"] == pytest.approx(plain.values["kld_mean"], rel=0.05)
    assert compiled.request.run()["tokens_per_s"] > 0


def test_a_loop_of_its_own_is_asked_for_its_logits(tmp_path: Path) -> None:
    reading = measured(tmp_path, OwnLoop(scores=True))
    assert reading.values["kld_mean"] > 1
    assert reading.values["top1_agreement"] < 0.1


def test_a_loop_that_gives_no_logits_has_no_quality(tmp_path: Path) -> None:
    reading = measured(tmp_path, OwnLoop(scores=False))
    assert_nothing(reading, "own_loop replaces the decode loop by one that gives no logits")


@pytest.mark.gpu
def test_a_cuda_graph_s_logits_are_copied_before_the_next_step_writes_over_them(tmp_path: Path) -> None:
    stack = resolve((TorchCompile(mode="reduce-overhead"),), "generate")
    plain = DecodingModel(MODEL, (), DeviceKind.CUDA, 0, ignore)
    assert make_reference(context_of(plain, tmp_path)).reasons == {}
    graphed = DecodingModel(MODEL, stack, DeviceKind.CUDA, 0, ignore)
    reading = QualityMeter().read(context_of(graphed, tmp_path))
    assert reading.values["kld_mean"] <= 1e-6
    assert reading.values["top1_agreement"] > 0.99
