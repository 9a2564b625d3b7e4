"""What one-line quantization does to a model, measured: bytes, speed and quality beside the unquantized one."""

from optigpu.facade.measuring import AskedWorkload, JobReport, ladder
from optigpu.vocabulary import UnsupportedError

__all__ = ["demo_production_ready"]


def demo_production_ready(
    model_name: str = "gpt2-large", workload: AskedWorkload = "generate", **fields: object
) -> JobReport:
    """Measures a model as it is and as `quantize` leaves it, in turns; print the report for its table.

    `model_name` is a model reference: a bare name is the hub's, `preset:gpt2-large` needs no network. `fields` are
    those of `optigpu.run`. Raises UnsupportedError, with the reason, when nothing could be measured: without a network
    for a hub's model, or without the memory for it.

    >>> from gpu_poor.examples import demo
    >>> results = demo.demo_production_ready(
    ...     "preset:tiny-gpt2-test",
    ...     workload={"kind": "generate", "prompt_tokens": 8, "new_tokens": 8},
    ...     measure={"replicates": 1, "min_seconds": 0.2, "max_seconds": 1, "meters": ["latency", "memory"]},
    ...     limits={"wait_for_quiet_s": 0},
    ... )
    >>> [result.variant.label for result in results.results]
    ['baseline', 'int8_hybrid']
    """
    report = ladder(workload, model_name, stack=["int8_hybrid"], progress=None, **fields)
    if not report.results:
        reasons = {row.reason for row in report.rows if row.reason}
        raise UnsupportedError(" ".join(sorted(reasons)) or f"Nothing was measured of {model_name}.")
    return report
