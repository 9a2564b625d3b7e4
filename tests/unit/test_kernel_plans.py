"""Plans of kernels follow from a card's limits, and say that they are predicted."""

import pytest

from optigpu.facade.kernel_optimizer import CUDAKernelOptimizer
from optigpu.hardware.cards import card_of
from optigpu.hardware.kernel_plans import Problem, planned
from optigpu.hardware.occupancy import occupancy
from optigpu.vocabulary import SpecError

CARDS = ("T4", "A10", "A100", "H100", "H200", "L4", "L40", "L40S", "RTX 4080", "RTX 4090", "RTX 5090")


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


def test_verification_guesses_more_where_more_is_accepted() -> None:
    optimizer = CUDAKernelOptimizer("H100")
    seldom, often = (optimizer.get_speculative_verify_config(acceptance=each) for each in (0.4, 0.9))
    assert seldom.draft_tokens < often.draft_tokens
    assert often.expected_tokens == pytest.approx((1 - 0.9 ** (often.draft_tokens + 1)) / 0.1)
    assert often.verify.problem.rows == often.draft_tokens + 1
    assert 1 < seldom.speedup < often.speedup < often.expected_tokens
    verified = optimizer.estimate_kernel_speedup("speculative_verify", rows=4)
    assert 3 < verified.speedup <= 4


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
