"""CUDAKernelOptimizer: plans of kernels for a card, computed from its limits, and measured where the card is. And
simulate_matmul: how long a matrix product takes at least, predicted from a rate and never measured."""

from collections.abc import Sequence
from math import isfinite
from typing import Literal, NamedTuple, get_args

from optigpu.documents.fields import require_known
from optigpu.facade.benchmark_result import Shown
from optigpu.hardware import probe
from optigpu.hardware.catalog import Dtype, HardwareKind, card_of, devices, find
from optigpu.hardware.kernel_plans import KernelPlan, Problem, planned, streamed_s
from optigpu.report.formats import Grid, columns, short
from optigpu.vocabulary import DeviceKind, Frozen, SpecError

Operation = Literal["fused_int4_gemm", "speculative_verify"]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)
INPUTS, OUTPUTS, GROUP = 4096, 14_336, 128
"""The MLP of Mistral 7B, and the group size that 4-bit checkpoints usually have."""
MOST_DRAFT_TOKENS = 16
SUMMARY_ROWS = (1, 16, 256, 4096)


class SpeculativeVerifyConfig(Frozen):
    """How many tokens a draft should guess, and how the pass that verifies them multiplies. One of `draft_tokens` is
    accepted with probability `acceptance`, independent of the others, and costs `draft_cost` of a plain step. Then a
    pass gives `expected_tokens` on average ((1 - a^(k+1)) / (1 - a): Leviathan et al., 2023, arXiv:2211.17192), and
    `speedup` is predicted over one token a step."""

    draft_tokens: int
    acceptance: float
    draft_cost: float
    expected_tokens: float
    verify: KernelPlan
    speedup: float
    basis: Literal["predicted"] = "predicted"


class KernelSpeedup(Frozen):
    """`seconds` of a kernel and of what it replaces, and their ratio: predicted, or measured where the card is."""

    operation: Operation
    card: str
    replaces: str
    seconds: float
    replaced_seconds: float
    basis: Literal["predicted", "measured"]

    @property
    def speedup(self) -> float:
        return self.replaced_seconds / self.seconds


class CUDAKernelOptimizer(Shown):
    """Plans kernels for a GPU of the catalog from its multiprocessors, instructions and rates.

    What it returns is data that says whether it was predicted or measured. Raises SpecError for an unknown GPU, with
    those whose multiprocessors the catalog knows.

    >>> from optigpu import CUDAKernelOptimizer
    >>> cuda_opt = CUDAKernelOptimizer(gpu_model="A100")
    >>> plan = cuda_opt.get_fused_int4_gemm_config(rows=1)
    >>> plan.bound.value, plan.mma, plan.basis
    ('memory', (16, 8, 16), 'predicted')
    >>> plan.shared_bytes <= cuda_opt.card.capability.shared_bytes_per_block
    True
    """

    def __init__(self, gpu_model: str = "A100") -> None:
        self.card = card_of(gpu_model)

    def get_fused_int4_gemm_config(
        self, rows: int = 1, inputs: int = INPUTS, outputs: int = OUTPUTS, group_size: int = GROUP
    ) -> KernelPlan:
        """The plan of a product that widens 4-bit weights in registers. Raises SpecError for sizes that do not fit."""
        return planned(self.card, Problem(rows=rows, inputs=inputs, outputs=outputs, group_size=group_size))

    def get_speculative_verify_config(
        self,
        acceptance: float = 0.7,
        draft_cost: float = 0.05,
        inputs: int = INPUTS,
        outputs: int = OUTPUTS,
        weight_bits: Literal[4, 16] = 16,
    ) -> SpeculativeVerifyConfig:
        """The number of draft tokens, up to 16, with the highest predicted speed, and the plan of their verification.
        Raises SpecError for an acceptance that is not between 0 and 1, and a negative cost."""
        if not 0 < acceptance < 1 or draft_cost < 0:
            raise SpecError(
                f"acceptance must be between 0 and 1 and draft_cost at least 0, not {acceptance} and {draft_cost}."
            )
        shape = {"inputs": inputs, "outputs": outputs, "weight_bits": weight_bits}
        counts = range(1, MOST_DRAFT_TOKENS + 2)
        step, *verifying = (planned(self.card, Problem(rows=rows, **shape)) for rows in counts)
        found = []
        for tokens, verify in enumerate(verifying, 1):
            expected = (1 - acceptance ** (tokens + 1)) / (1 - acceptance)
            found.append(
                SpeculativeVerifyConfig(
                    draft_tokens=tokens,
                    acceptance=acceptance,
                    draft_cost=draft_cost,
                    expected_tokens=expected,
                    verify=verify,
                    speedup=expected / (verify.seconds / step.seconds + draft_cost * tokens),
                )
            )
        return max(found, key=lambda each: (each.speedup, -each.draft_tokens))

    def estimate_kernel_speedup(
        self,
        operation: str = "fused_int4_gemm",
        rows: int = 1,
        inputs: int = INPUTS,
        outputs: int = OUTPUTS,
        group_size: int = GROUP,
    ) -> KernelSpeedup:
        """What a kernel buys over what it replaces; `fused_int4_gemm` is measured where this machine has the card.
        fused_int4_gemm replaces widening all weights into memory and multiplying in float16; speculative_verify, of
        `rows` tokens, as many steps of one. Raises SpecError for another operation."""
        unknown = f"operation: {operation!r} is unknown"
        require_known(operation, OPERATIONS, unknown, "The operations are")
        shape = {"inputs": inputs, "outputs": outputs, "weight_bits": 16}
        if operation == "speculative_verify":
            one, several = (planned(self.card, Problem(rows=count, **shape)) for count in (1, rows))
            return KernelSpeedup(
                operation="speculative_verify",
                card=self.card.device.name,
                replaces=f"{rows} products of one row",
                seconds=several.seconds,
                replaced_seconds=rows * one.seconds,
                basis="predicted",
            )
        if self.is_here:
            return self.measure(DeviceKind.CUDA, rows, inputs, outputs, group_size)
        fused = self.get_fused_int4_gemm_config(rows, inputs, outputs, group_size)
        plain = planned(self.card, Problem(rows=rows, group_size=group_size, **shape))
        widening = streamed_s(self.card, fused.problem.weight_bytes + plain.problem.weight_bytes)
        return KernelSpeedup(
            operation="fused_int4_gemm",
            card=self.card.device.name,
            replaces="widening the weights into memory, then a float16 product",
            seconds=fused.seconds,
            replaced_seconds=widening + plain.seconds,
            basis="predicted",
        )

    @property
    def is_here(self) -> bool:
        accelerators = probe().accelerators
        return bool(accelerators) and find(accelerators[0].name) == self.card.device

    @staticmethod
    def measure(
        device: DeviceKind, rows: int, inputs: int, outputs: int, group_size: int = GROUP
    ) -> KernelSpeedup:
        """The repository's own int4 product against widening and multiplying, in turns, on a device of this machine.
        Raises UnsupportedError when there is no such device."""
        from optigpu.backends.torch.own_module import int4_product_seconds

        environment = probe()
        fused_s, widened_s = int4_product_seconds(device, rows, inputs, outputs, group_size)
        is_gpu = device is DeviceKind.CUDA and environment.accelerators
        return KernelSpeedup(
            operation="fused_int4_gemm",
            card=environment.accelerators[0].name if is_gpu else environment.cpu_model,
            replaces="widening the weights into memory, then a bfloat16 product",
            seconds=fused_s,
            replaced_seconds=widened_s,
            basis="measured",
        )

    def print_optimization_summary(self) -> None:
        """Prints the plans for a few numbers of rows, and the verification of draft tokens."""
        print(self)

    def grids(self) -> Sequence[Grid]:
        found = self.get_speculative_verify_config()
        headings = columns("draft tokens", "tokens a pass", "speedup", "tile", "bound")
        tiling = found.verify.tiling
        row = (
            str(found.draft_tokens),
            short(found.expected_tokens),
            f"{found.speedup:.2f}x",
            f"{tiling.m} x {tiling.n} x {tiling.k}",
            found.verify.bound.value,
        )
        note = (
            f"Predicted for tokens that are accepted with probability {found.acceptance} and cost {found.draft_cost} "
            "of a step each."
        )
        return (_products(self), Grid("Verification of draft tokens", headings, (row,), (note,)))


def _products(optimizer: CUDAKernelOptimizer) -> Grid:
    shape = ("rows:", "tile", "warps:", "stages:", "split:", "shared KiB:")
    headings = columns(*shape, "blocks/SM:", "occupancy:", "bound", "us:", "gain:")
    gains = [optimizer.estimate_kernel_speedup(rows=rows) for rows in SUMMARY_ROWS]
    plans = map(optimizer.get_fused_int4_gemm_config, SUMMARY_ROWS)
    rows = tuple(_row(plan, gain) for plan, gain in zip(plans, gains, strict=True))
    card = optimizer.card
    notes = (
        f"{card.device.name}: {card.multiprocessors} multiprocessors, {card.capability.shared_bytes // 1024} KiB of "
        f"shared memory and {card.capability.registers} registers each ({card.device.source}).",
        f"us: predicted, for {INPUTS} inputs and {OUTPUTS} outputs in groups of {GROUP}; registers are estimated.",
        f"gain: over {gains[0].replaces}, {gains[0].basis}.",
    )
    return Grid("Fused int4 products", headings, rows, notes)


def _row(plan: KernelPlan, gain: KernelSpeedup) -> tuple[str, ...]:
    tiling = plan.tiling
    return (
        str(plan.problem.rows),
        f"{tiling.m} x {tiling.n} x {tiling.k}",
        *map(str, (tiling.warps, tiling.stages, tiling.split_k)),
        short(plan.shared_bytes / 1024),
        str(plan.occupancy.blocks),
        f"{plan.occupancy.share:.0%}",
        plan.bound.value,
        short(1e6 * plan.seconds),
        f"{gain.speedup:.2f}x",
    )


KINDS = (HardwareKind.CPU, HardwareKind.GPU, HardwareKind.TPU)


class MatmulPrediction(NamedTuple):
    """A prediction: the operations of a product, and the seconds that a device takes that always runs at its rate."""

    flops: int
    seconds: float

    def __str__(self) -> str:
        return f"prediction: {self.flops / 1e9:.4g} GFLOP in {self.seconds * 1e3:.4g} ms at least"


class PredictedDevice(NamedTuple):
    """A device of the catalog with the prediction at its published (or derived) peak rate; `source` is the rate's."""

    name: str
    kind: HardwareKind
    gflops: float
    prediction: MatmulPrediction
    source: str


def simulate_matmul(size: int, device_gflops: float) -> MatmulPrediction:
    """Predicts a product of two square matrices with sides of `size`; `device_gflops` are 10**9 operations a second.

    A multiplication and an addition are two operations, so that there are 2 * size**3. A real product takes longer;
    `optigpu.run("matmul")` measures it. Raises SpecError for a size below 1 and a rate that is not positive.

    >>> from optigpu import simulate_matmul
    >>> flops, seconds = simulate_matmul(1000, 800)
    >>> flops, seconds
    (2000000000, 0.0025)
    >>> print(simulate_matmul(1000, 800))
    prediction: 2 GFLOP in 2.5 ms at least
    """
    if size < 1:
        raise SpecError(f"size: a matrix has sides of 1 or more, not {size}.")
    if not (isfinite(device_gflops) and device_gflops > 0):
        raise SpecError(f"device_gflops: {device_gflops} is no rate; name 10**9 operations a second above 0.")
    flops = 2 * size**3
    return MatmulPrediction(flops, flops / (device_gflops * 1e9))


def simulate_matmul_devices(size: int, dtype: Dtype = "fp32") -> tuple[PredictedDevice, ...]:
    """`simulate_matmul` for the CPUs, GPUs and TPUs of the catalog that compute in `dtype`, the slowest first."""
    rows = []
    for each in devices():
        if each.kind in KINDS and (rate := each.peak_flop_per_s.get(dtype, 0.0) / 1e9):
            made = PredictedDevice(each.name, each.kind, rate, simulate_matmul(size, rate), each.source)
            rows.append(made)
    return tuple(sorted(rows, key=lambda row: row.gflops))
