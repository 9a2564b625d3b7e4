"""KernelOptimizer: fused operators beside separate ones, on this machine."""

from collections.abc import Sequence

from optigpu.facade.in_process import device_of
from optigpu.facade.job_report import JobReport
from optigpu.facade.measuring import job_spec, printed
from optigpu.hardware import best_device
from optigpu.job.bench import SIZES, brief
from optigpu.vocabulary import BenchMode


class KernelOptimizer:
    """Runs the workloads `normalization` and `attention` in processes of their own, and prints their tables.

    Both take the fields of a job as `optigpu.run` does (device, measure, limits, ...) and raise what it raises.
    """

    @staticmethod
    def benchmark_layernorm(
        *,
        widths: Sequence[int] = (768,),
        rows: int = 2048,
        dtype: str = "float32",
        progress: bool | None = None,
        **fields: object,
    ) -> JobReport:
        """Layer norm over `rows` rows of each width, after a residual and without one: separate operators, and fused.

        >>> from optigpu import KernelOptimizer
        >>> report = KernelOptimizer.benchmark_layernorm(
        ...     widths=[64],
        ...     rows=64,
        ...     device="cpu",
        ...     measure={"replicates": 1, "min_seconds": 0.05, "max_seconds": 0.2, "meters": ["latency"]},
        ...     limits={"wait_for_quiet_s": 0},
        ... )  # doctest: +ELLIPSIS
        normalization ...
        >>> [result.variant.label for result in report.results][:2]
        ['standard layer_norm 64', 'fused layer_norm 64']
        """
        workload = {
            "kind": "normalization",
            "norms": ["layer_norm"],
            "widths": widths,
            "rows": rows,
            "dtype": dtype,
        }
        return printed(job_spec(workload, None, (), {**brief(BenchMode.QUICK), **fields}), progress)

    @staticmethod
    def benchmark_attention(
        *,
        lengths: Sequence[int] | None = None,
        dtype: str = "float32",
        progress: bool | None = None,
        **fields: object,
    ) -> JobReport:
        """Causal attention over each length: scores, softmax and product one by one, and in one fused operator.

        Without `lengths` it takes those of `optigpu bench`.
        """
        device = device_of(str(fields.get("device", best_device())))
        usual = SIZES[device, BenchMode.QUICK].lengths
        workload = {"kind": "attention", "lengths": lengths or usual, "dtype": dtype}
        return printed(job_spec(workload, None, (), {**brief(BenchMode.QUICK), **fields}), progress)
