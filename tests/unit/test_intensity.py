"""What bounds a kernel, from shapes alone, and how kernels add up to shares of a request's time."""

import pytest

from optigpu.documents.peaks import Bound
from optigpu.hardware.intensity import Kernel, Operator, bound_of, bound_of_kernel, share, table
from optigpu.vocabulary import DeviceKind

CPU, CUDA = DeviceKind.CPU, DeviceKind.CUDA
MEMORY, COMPUTE = Bound.MEMORY, Bound.COMPUTE


def product(rows: int, name: str = "aten::mm", item: int | None = 4, flops: int | None = None) -> Operator:
    """[rows, 1024] times [1024, 1024]."""
    counted = 2 * rows * 1024**2 if flops is None else flops
    return Operator(name, ((rows, 1024), (1024, 1024)), (item, item), counted)


@pytest.mark.parametrize(
    ("operator", "device", "bound"),
    [
        (product(1), CPU, MEMORY),
        (product(1024), CPU, COMPUTE),
        (product(64), CPU, COMPUTE),
        (product(64), CUDA, MEMORY),
        (product(1024), CUDA, COMPUTE),
        (product(1024, "aten::_int_mm", flops=0), CUDA, COMPUTE),
        (product(1, "optigpu::int8_linear", flops=0), CPU, MEMORY),
        (product(512, "optigpu::int8_linear", flops=0), CPU, COMPUTE),
        (product(1024, item=None), CPU, COMPUTE),
        (product(1, item=None), CPU, MEMORY),
        (product(20, item=None), CPU, None),
        (Operator("aten::mm"), CPU, None),
        (Operator("aten::add", ((4096, 4096),) * 2, (4, 4), 4096**2), CPU, MEMORY),
        (Operator("aten::_softmax", ((8, 4096),), (4,)), CUDA, MEMORY),
        (Operator("optigpu::something_new", ((8, 4096),), (4,)), CPU, None),
    ],
)
def test_an_operator_s_intensity_against_the_ridge_decides(
    operator: Operator, device: DeviceKind, bound: Bound | None
) -> None:
    assert bound_of(operator, device) is bound


@pytest.mark.parametrize(("queries", "bound"), [(1, MEMORY), (2048, COMPUTE)])
@pytest.mark.parametrize(
    "name", ["aten::_scaled_dot_product_flash_attention", "aten::_flash_attention_forward"]
)
def test_attention_counts_queries_times_keys(name: str, queries: int, bound: Bound) -> None:
    heads_first = "scaled" in name
    shapes = tuple((1, 32, n, 128) if heads_first else (1, n, 32, 128) for n in (queries, 2048, 2048))
    assert bound_of(Operator(name, shapes, (2, 2, 2)), CUDA) is bound


def test_two_4_bit_weights_lie_in_a_byte() -> None:
    """[8, 1024] in bf16 times 1024 x 1024 weights in half a MiB: 2^24 FLOPs over 540,672 bytes, 31 per byte."""
    shapes = ((8, 1024), (1024, 128))
    operator = Operator("aten::_weight_int4pack_mm", shapes, (2, 4))
    assert bound_of(operator, CPU) is COMPUTE
    as_floats = Operator("aten::_weight_floatpack_mm", shapes, (2, 4))
    assert bound_of(as_floats, CPU) is MEMORY


def test_a_kernel_without_operator_is_told_only_when_its_name_says_that_it_streams() -> None:
    for name in (
        "vectorized_elementwise_kernel<4>",
        "triton_red_fused_add_3",
        "Memcpy DtoD",
        "gemvNSP_kernel",
    ):
        assert bound_of_kernel(name) is MEMORY
    for name in ("sm90_xmma_gemm_bf16bf16", "flash_fwd_kernel", "my_kernel"):
        assert bound_of_kernel(name) is None


def test_shares_and_table_weigh_each_kernel_by_what_it_stands_for() -> None:
    kernels = [
        Kernel("first", 3.0, COMPUTE, weight=1, in_steps=False),
        Kernel("step", 1.0, MEMORY, weight=5, in_steps=True),
        Kernel("step", 1.0, MEMORY, weight=5, in_steps=True),
        Kernel("new", 2.0, None, weight=1, in_steps=False),
    ]
    assert [share(kernels, bound) for bound in (COMPUTE, MEMORY, None)] == [3 / 15, 10 / 15, 2 / 15]
    rows = table(kernels)
    assert [row["name"] for row in rows] == ["step", "first", "new"]
    assert rows[0] == {"name": "step", "calls": 2, "self_s": 2.0, "share": 10 / 15, "bound": MEMORY}
