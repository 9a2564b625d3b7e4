"""attention and normalization: their arithmetic, their checks, what they refuse, and what they allocate."""

from pathlib import Path
from typing import Any

import pytest

from optigpu.backends.torch import memory, operators
from optigpu.backends.torch.operators import TorchOperatorRuntime
from optigpu.meters.base import MeterContext, QualityOptions
from optigpu.meters.memory import MemoryMeter
from optigpu.vocabulary import DeviceKind, UnsupportedError
from optigpu.workloads.attention import Attention, needed_bytes
from optigpu.workloads.base import Workload
from optigpu.workloads.normalization import Normalization
from optigpu.workloads.requests.operators import Dtype

DTYPES: tuple[Dtype, ...] = ("float32", "float16", "bfloat16")
SHAPES = {"heads": 4, "kv_heads": 2, "head_size": 32}


@pytest.fixture
def runtime() -> TorchOperatorRuntime:
    return TorchOperatorRuntime(DeviceKind.CPU, seed=0)


def attention(implementation: Any, length: int, **shapes: Any) -> Attention:
    return Attention(lengths=(length,), implementations=(implementation,), **SHAPES | shapes)


def norm(
    implementation: Any, name: Any = "layer_norm", *, residual: bool = True, **shapes: Any
) -> Normalization:
    given = {"rows": 33, "widths": (40,)} | shapes
    return Normalization(implementations=(implementation,), norms=(name,), residuals=(residual,), **given)


def problem_of(workload: Workload, runtime: TorchOperatorRuntime) -> str:
    return workload.prepare(runtime).check().problem or ""


def test_lists_stand_for_one_workload_each() -> None:
    assert [each.label for each in Attention(lengths=(8, 16)).expand()] == [
        "standard 8",
        "fused 8",
        "standard 16",
        "fused 16",
    ]
    norms = Normalization(norms=("rms_norm",), widths=(8, 16)).expand()
    assert [each.label for each in norms] == [
        "standard rms_norm 8",
        "fused rms_norm 8",
        "standard rms_norm with residual 8",
        "fused rms_norm with residual 8",
        "standard rms_norm 16",
        "fused rms_norm 16",
        "standard rms_norm with residual 16",
        "fused rms_norm with residual 16",
    ]
    assert all(each.expand() == (each,) for each in norms)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("implementation", ["standard", "fused"])
def test_attention_is_right_whatever_its_shape(
    runtime: TorchOperatorRuntime, implementation: str, causal: bool, dtype: Dtype
) -> None:
    for length, shapes in ((1, {}), (7, {"batch_size": 2}), (130, {"kv_heads": None, "head_size": 64})):
        workload = attention(implementation, length, causal=causal, dtype=dtype, **shapes)
        assert problem_of(workload, runtime) == ""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("implementation", ["standard", "fused"])
def test_a_norm_is_right_whatever_its_shape(
    runtime: TorchOperatorRuntime, implementation: str, name: str, dtype: Dtype
) -> None:
    for residual in (True, False):
        for width in (8, 77, 1024):
            workload = norm(implementation, name, residual=residual, widths=(width,), dtype=dtype)
            assert problem_of(workload, runtime) == ""


def test_each_request_yields_the_metrics_of_its_workload(runtime: TorchOperatorRuntime) -> None:
    request = attention("standard", 64, batch_size=2).prepare(runtime)
    sample = request.run()
    operations = 4 * 2 * 4 * 32 * 64 * 65 / 2
    assert sample["tflops"] == pytest.approx(operations / sample["latency_s"] / 1e12)
    assert set(sample) == set(Attention.metrics)
    sample = norm("standard").prepare(runtime).run()
    moved = 4 * (4 * 33 * 40 + 2 * 40)
    assert sample["gb_per_s"] == pytest.approx(moved / sample["latency_s"] / 1e9)
    assert set(sample) == set(Normalization.metrics)
    assert runtime.notes.facts["calls_per_sample"] > 10, "long enough for the clock"


def test_a_full_square_has_as_many_pairs_as_it_has_places() -> None:
    assert attention("fused", 64, causal=False).pairs == 64**2
    assert attention("fused", 64).pairs == 64 * 65 / 2


@pytest.mark.parametrize("implementation", ["standard", "fused"])
def test_the_kernels_that_ran_are_recorded(runtime: TorchOperatorRuntime, implementation: str) -> None:
    attention(implementation, 64).prepare(runtime).observe()
    fused = ["aten::_scaled_dot_product_flash_attention_for_cpu"]
    assert runtime.notes.facts["attention_kernels"] == (
        fused if implementation == "fused" else ["aten::_softmax"]
    )


def test_attention_that_looks_ahead_is_found(runtime: TorchOperatorRuntime) -> None:
    request: Any = attention("standard", 64).prepare(runtime)
    request.operator._hidden = None
    assert (request.check().problem or "").startswith("The attention is wrong")


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_with_another_scale_is_found(
    runtime: TorchOperatorRuntime, dtype: Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    exact = torch.nn.functional.scaled_dot_product_attention

    def hotter(query: Any, key: Any, value: Any, **named: Any) -> Any:
        return exact(1.2 * query, key, value, **named)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", hotter)
    assert problem_of(attention("fused", 64, dtype=dtype), runtime).startswith("The attention is wrong")


@pytest.mark.parametrize("implementation", ["standard", "fused"])
def test_rounding_to_another_dtype_is_found(
    runtime: TorchOperatorRuntime, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention in bfloat16 is not right as one in float32, nor is a norm."""
    for workload in (attention(implementation, 64), norm(implementation)):
        request: Any = workload.prepare(runtime)
        whole = request.operator.call

        def rounded(whole: Any = whole) -> Any:
            found = whole()
            return (
                (found[0].bfloat16().float(), found[1])
                if isinstance(found, tuple)
                else found.bfloat16().float()
            )

        monkeypatch.setattr(request.operator, "call", rounded)
        assert "is wrong: an element is off by" in (request.check().problem or "")


def test_fresh_requests_have_other_numbers_in_the_same_storages(runtime: TorchOperatorRuntime) -> None:
    for workload in (attention("fused", 32), norm("fused")):
        request: Any = workload.prepare(runtime)
        before = [tensor.clone() for tensor in request.operator.held()]
        places = [tensor.data_ptr() for tensor in request.operator.held()]
        again = request.fresh(7)
        assert [tensor.data_ptr() for tensor in again.operator.held()] == places
        assert not any(old.equal(new) for old, new in zip(before[:2], again.operator.held(), strict=False))
        assert again.check().problem is None


def test_what_does_not_fit_is_refused_before_it_is_made(
    runtime: TorchOperatorRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_host_bytes", lambda: 3_000_000)
    attention("fused", 1024, kv_heads=4).prepare(runtime)
    with pytest.raises(UnsupportedError, match="arrays of standard attention over 1024 tokens need"):
        attention("standard", 1024, kv_heads=4).prepare(runtime)
    with pytest.raises(UnsupportedError, match="40000 rows of 40 float32 numbers need"):
        norm("standard", rows=40_000).prepare(runtime)


@pytest.mark.parametrize(
    "words",
    [
        "No available kernel. Aborting execution.",
        "No viable backend for scaled_dot_product_attention was found.",
    ],
)
def test_without_a_fused_kernel_there_is_none_to_time(
    words: str, runtime: TorchOperatorRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch says it in two ways."""
    import torch

    def refuse(*given: Any, **named: Any) -> Any:
        raise RuntimeError(words)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", refuse)
    with pytest.raises(
        UnsupportedError, match=r"no fused attention kernel for float32 .* in groups on this cpu"
    ):
        attention("fused", 16).prepare(runtime)
    monkeypatch.setattr(operators, "norm_backend", lambda _: "torch")
    with pytest.raises(UnsupportedError, match="no fused norm on this cpu"):
        norm("fused").prepare(runtime)


def test_another_failure_of_a_kernel_is_no_refusal(
    runtime: TorchOperatorRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    def fail(*given: Any, **named: Any) -> Any:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        attention("fused", 16).prepare(runtime)


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of kv_heads"):
        Attention(heads=4, kv_heads=3)


class TestMemory:
    """What one call takes on a CPU, as torch's allocator is asked for it."""

    @staticmethod
    def peak(workload: Workload, folder: Path) -> float:
        runtime = TorchOperatorRuntime(DeviceKind.CPU, seed=0)
        context = MeterContext(
            runtime, workload.prepare(runtime), workload, None, folder, 0, QualityOptions()
        )
        return MemoryMeter().read(context).values["peak_bytes"]

    def test_standard_attention_holds_two_matrices_of_scores_and_fused_none(self, tmp_path: Path) -> None:
        length = 512
        standard, fused = (
            self.peak(attention(name, length, kv_heads=4), tmp_path) for name in ("standard", "fused")
        )
        rows, scores, hidden = 4 * 32 * length * 4, 4 * length**2 * 4, length**2
        assert standard == pytest.approx(4 * rows + hidden + 2 * scores, rel=0.01)
        assert 4 * rows <= fused < 4 * rows + scores / 4

    def test_the_peak_of_standard_attention_grows_with_the_square_of_the_length(self, tmp_path: Path) -> None:
        short, long = (self.peak(attention("standard", length), tmp_path) for length in (256, 1024))
        assert long / short > 10

    @pytest.mark.parametrize("residual", [True, False])
    def test_a_fused_norm_holds_its_inputs_and_its_results(self, residual: bool, tmp_path: Path) -> None:
        workload = norm("fused", residual=residual, rows=256, widths=(512,))
        assert self.peak(workload, tmp_path) == pytest.approx(workload.bytes, rel=0.01)

    def test_the_shared_memory_of_results_and_what_is_asked_for_before_agree(
        self, runtime: TorchOperatorRuntime, tmp_path: Path
    ) -> None:
        workload = attention("standard", 512)
        needed = needed_bytes(workload.shape)
        assert self.peak(workload, tmp_path) <= needed
