"""Published peaks, occupancy by NVIDIA's rules, and plans of kernels that follow from a card's limits."""

import re

import pytest

from optigpu.documents.peaks import Bound
from optigpu.facade.kernel_optimizer import CUDAKernelOptimizer
from optigpu.hardware.catalog import (
    Device,
    Dtype,
    HardwareKind,
    capabilities,
    card_of,
    devices,
    find,
    find_class,
    gpu_of,
)
from optigpu.hardware.intensity import Kernel, Operator, bound_of, bound_of_kernel, share, table
from optigpu.hardware.kernel_plans import Problem, occupancy, planned, refusal
from optigpu.vocabulary import DeviceKind, SpecError

CARDS = ("T4", "A10", "A100", "H100", "H200", "L4", "L40", "L40S", "RTX 4080", "RTX 4090", "RTX 5090")
BY_NAME = {each.name: each for each in capabilities()}


@pytest.mark.parametrize(
    ("capability", "threads", "registers", "shared_bytes", "blocks", "share", "limited_by"),
    [
        # The Programming Guide's own example of registers: 64 of each thread and 512 threads leave room for two blocks.
        ("sm_80", 512, 64, 0, 2, 0.5, ("registers",)),
        ("sm_80", 256, 32, 0, 8, 1.0, ("threads", "registers")),
        ("sm_80", 32, 16, 0, 32, 0.5, ("blocks",)),  # 32 blocks at most, of 64 warps
        # 33 * 32 are 1280 in units of 256: 12 warps in a quarter
        ("sm_80", 256, 33, 0, 6, 0.75, ("registers",)),
        ("sm_80", 128, 16, 81_920, 2, 0.125, ("shared memory",)),  # and 1 KiB each for the driver
        ("sm_75", 64, 32, 16_384, 4, 0.25, ("shared memory",)),  # nothing is reserved
        # 3 warps in each quarter, so 12, of which a block takes 3
        ("sm_89", 96, 168, 0, 4, 0.25, ("registers",)),
        ("sm_90", 384, 168, 200_000, 1, 0.1875, ("registers", "shared memory")),
        ("sm_120", 128, 128, 45_000, 2, 1 / 6, ("shared memory",)),
    ],
)
def test_blocks_at_once(
    capability: str,
    threads: int,
    registers: int,
    shared_bytes: int,
    blocks: int,
    share: float,
    limited_by: tuple[str, ...],
) -> None:
    found = occupancy(BY_NAME[capability], threads, registers, shared_bytes)
    assert (found.blocks, found.share, found.limited_by) == (blocks, share, limited_by)
    assert found.warps == blocks * threads // 32


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ((2048, 32, 0), "2048 threads of a block are too many: sm_80 allows 1024"),
        ((32, 256, 0), "256 registers of a thread .* allows 255"),
        ((1024, 128, 0), "131072 registers of a block .* allows 65536"),
        ((32, 32, 166_913), "166913 bytes of shared memory .* allows 166912"),
        ((0, 32, 0), "at least one thread"),
    ],
)
def test_a_block_that_cannot_run_names_the_limit(asked: tuple[int, int, int], said: str) -> None:
    assert re.search(said, refusal(BY_NAME["sm_80"], *asked) or "")
    assert occupancy(BY_NAME["sm_80"], *asked).blocks == 0


def test_an_unknown_card_lists_the_known() -> None:
    with pytest.raises(
        SpecError, match=r"'RTX 9090' .* Did you mean .*RTX [345]090.* Its GPUs are .*A10, A100.*T4"
    ):
        card_of("RTX 9090")
    with pytest.raises(SpecError, match="Its GPUs are") as known:
        card_of("MI300X")
    assert "MI300X" not in str(known.value).partition("Its GPUs are")[2]
    assert gpu_of("MI300X").name == "AMD Instinct MI300X"
    assert gpu_of("A100").name == "NVIDIA A100 SXM 80GB"


def mlp(rows: int, **changes: int) -> Problem:
    return Problem.model_validate({"rows": rows, "inputs": 4096, "outputs": 14_336, **changes})


@pytest.mark.parametrize("rows", [1, 300])
@pytest.mark.parametrize("name", CARDS)
def test_a_plan_fits_its_card(name: str, rows: int) -> None:
    card, plan = card_of(name), CUDAKernelOptimizer(name).get_fused_int4_gemm_config(rows)
    room = occupancy(card.capability, plan.threads, plan.registers, plan.shared_bytes)
    assert plan.occupancy == room
    assert room.blocks
    m, n, k = plan.mma
    tiling = plan.tiling
    assert (tiling.m % m, tiling.n % n, tiling.k % k) == (0, 0, 0)
    assert plan.shared_bytes <= card.capability.shared_bytes_per_block
    tiles = -(-rows // tiling.m) * -(-14_336 // tiling.n)
    assert plan.blocks == tiles * tiling.split_k
    assert plan.waves == -(-plan.blocks // (card.multiprocessors * room.blocks))
    assert plan.basis == "predicted"
    assert tiling.stages == 2 or card.allocation.async_copy


@pytest.mark.slow
@pytest.mark.parametrize("name", CARDS)
def test_no_prediction_is_faster_than_the_cards_roofs(name: str) -> None:
    device = card_of(name).device
    assert device.memory_bandwidth_bytes_per_s is not None
    for rows in (1, 64, 4096):
        problem = mlp(rows)
        plan = planned(card_of(name), problem)
        bytes_s = (problem.weight_bytes + problem.io_bytes) / device.memory_bandwidth_bytes_per_s
        assert plan.seconds > max(bytes_s, problem.flops / device.peak_flop_per_s["fp16"])
        assert plan.seconds < 3 * max(bytes_s, problem.flops / device.peak_flop_per_s["fp16"])


def test_fusing_is_worth_more_for_few_rows() -> None:
    optimizer = CUDAKernelOptimizer("A100")
    few, many = (optimizer.estimate_kernel_speedup("fused_int4_gemm", rows=rows) for rows in (1, 4096))
    assert few.speedup > 4 > many.speedup > 1
    assert (few.basis, few.card) == ("predicted", "NVIDIA A100 SXM 80GB")


def test_what_is_unknown_or_does_not_fit_says_so() -> None:
    optimizer = CUDAKernelOptimizer("A100")
    with pytest.raises(SpecError, match=r"'A101' is not in the catalog.*Did you mean"):
        CUDAKernelOptimizer("A101")
    with pytest.raises(SpecError, match="The operations are fused_int4_gemm, speculative_verify"):
        optimizer.estimate_kernel_speedup("fused_gemm")
    with pytest.raises(SpecError, match="group_size 96 does not divide 4096 inputs"):
        optimizer.get_fused_int4_gemm_config(group_size=96)
    with pytest.raises(SpecError, match="at least one row"):
        optimizer.get_fused_int4_gemm_config(rows=0)
    with pytest.raises(SpecError, match="acceptance must be between 0 and 1"):
        optimizer.get_speculative_verify_config(acceptance=1.0)


# ---- What bounds a kernel, and how kernels add up to shares of a request's time.


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
        # 1024 x 1024 weights in half a MiB: 2^24 FLOPs over 540,672 bytes, 31 per byte; as floats 8 MiB
        (Operator("aten::_weight_int4pack_mm", ((8, 1024), (1024, 128)), (2, 4)), CPU, COMPUTE),
        (Operator("aten::_weight_floatpack_mm", ((8, 1024), (1024, 128)), (2, 4)), CPU, MEMORY),
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


NAMES = [name for device in devices() for name in (device.name, *device.aliases)]
BOTH = [
    (device, dtype)
    for device in devices()
    for dtype in sorted(device.published_flop_per_s.keys() & device.derived_flop_per_s())
]


def known(name: str) -> Device:
    """A device that must be there."""
    device = find(name)
    assert device is not None, name
    return device


def test_no_two_devices_share_a_name() -> None:
    assert [find(name) for name in NAMES] == [
        device for device in devices() for _ in (device.name, *device.aliases)
    ]
    assert len({name.casefold() for name in NAMES}) == len(NAMES)


@pytest.mark.parametrize(
    "name", ["NVIDIA A10G", "RTX", "GeForce", "NVIDIA A100", "NVIDIA L40 S", "Apple M", "", "5090"]
)
def test_a_part_of_a_name_and_a_neighbour_of_it_find_nothing(name: str) -> None:
    assert find(name) is None


@pytest.mark.parametrize(
    ("hardware_class", "name"),
    [
        ("1x NVIDIA H200 140 GiB", "NVIDIA H200"),
        ("8x NVIDIA H100 80GB HBM3 80 GiB", "NVIDIA H100 SXM"),
        ("1x NVIDIA GeForce RTX 4060 Laptop GPU 8 GiB", "NVIDIA GeForce RTX 4060 Laptop GPU"),
        ("AMD EPYC 7763 64 cores", "AMD EPYC 7763"),
        ("AMD EPYC 7763 1 core", "AMD EPYC 7763"),
    ],
)
def test_a_class_of_hardware_is_found(hardware_class: str, name: str) -> None:
    device = find_class(hardware_class)
    assert device is not None
    assert device.name == name


@pytest.mark.parametrize(("device", "dtype"), BOTH, ids=lambda value: getattr(value, "name", value))
def test_a_published_peak_is_what_units_and_clock_give(device: Device, dtype: Dtype) -> None:
    derived, published = device.derived_flop_per_s(), device.published_flop_per_s
    assert derived[dtype] == pytest.approx(published[dtype], rel=0.015)


@pytest.mark.parametrize("device", devices(), ids=lambda device: device.name)
def test_a_device_has_a_source_a_peak_or_a_bandwidth_and_faster_narrow_types(device: Device) -> None:
    assert device.source
    assert device.peak_flop_per_s or device.memory_bandwidth_bytes_per_s
    peaks = device.peak_flop_per_s
    halved: tuple[tuple[Dtype, Dtype], ...] = (
        ("fp32", "fp16"),
        ("fp16", "int8"),
        ("bf16", "int8"),
        ("fp16", "fp8"),
        ("int8", "int4"),
    )
    for wide, narrow in halved:
        if wide in peaks and narrow in peaks:
            assert 0.99 <= peaks[narrow] / peaks[wide] <= 20
    if device.kind is HardwareKind.GPU:
        assert device.memory_bytes
        assert device.tdp_w
        assert device.memory_bytes % 2**29 == 0


def test_every_nvidia_card_has_the_limits_of_one_capability() -> None:
    cards = [card for each in capabilities() for card in each.cards]
    gpus = [device.name for device in devices() if device.kind is HardwareKind.GPU]
    assert {name for name in gpus if name.startswith("NVIDIA")} <= set(cards)
    assert len(set(cards)) == len(cards)
