"""python -m optigpu.child.peaks: the process that measures what the machine itself can do.

It reads one `RunPeaks` from stdin and answers with `Peaks` or `Broken`, as `optigpu.child.connection` says.
"""

from typing import NoReturn

from optigpu.child.connection import broken, connect, use_threads
from optigpu.child.messages import RunPeaks
from optigpu.documents.peaks import Peaks, ReadRate
from optigpu.vocabulary import utc_now


def main() -> NoReturn:
    """Answers each order, for ever: the thread that reads stdin ends the process."""
    lines, tell = connect("optigpu.child.peaks", "Measures bandwidth and arithmetic of this machine.")
    while True:
        line = lines.get()
        try:
            tell(measured(RunPeaks.model_validate_json(line)))
        except Exception as error:
            tell(broken(error))


def measured(order: RunPeaks) -> Peaks:
    """The machine's peaks, in about three seconds after torch is loaded.

    Raises UnsupportedError when there is no such device.
    """
    use_threads(order.threads)
    import torch

    from optigpu.backends.torch.peak_rates import bandwidth, matmul_rates

    found = bandwidth(order.device)
    rates, reasons = matmul_rates(order.device)
    return Peaks(
        device=order.device,
        threads=order.threads,
        measured_at=utc_now(),
        torch=torch.__version__,
        reads=tuple(ReadRate(array_bytes=size, bytes_per_s=rate) for size, rate in found.reads.items()),
        copy_bytes_per_s=found.copy_bytes_per_s,
        matmul_flops_per_s=rates,
        reasons=reasons,
    )


if __name__ == "__main__":
    main()
