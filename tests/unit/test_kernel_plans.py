"""Occupancy by NVIDIA's rules; plans of kernels follow from a card's limits, and say that they are predicted."""

import re

import pytest

from optigpu.facade.kernel_optimizer import CUDAKernelOptimizer
from optigpu.hardware.catalog import capabilities, card_of, gpu_of
from optigpu.hardware.kernel_plans import Problem, occupancy, planned, refusal
from optigpu.vocabulary import SpecError

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
