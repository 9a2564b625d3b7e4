"""python -m optigpu.child.peaks: the process that measures the machine's peak rates.

It reads one `RunPeaks` from stdin and answers with `Peaks` or `Broken`, as `optigpu.child.connection` says.
"""

from typing import NoReturn

from optigpu.backends import BACKENDS
from optigpu.child.connection import broken, connect
from optigpu.child.messages import RunPeaks
from optigpu.child.priority import raise_priority
from optigpu.documents.peaks import Peaks


def main() -> NoReturn:
    """Answers each order, for ever: the thread that reads stdin ends the process."""
    lines, tell = connect("optigpu.child.peaks", "Measures the peak rates of this machine.")
    while True:
        line = lines.get()
        try:
            tell(measured(RunPeaks.model_validate_json(line)))
        except Exception as error:
            tell(broken(error))


def measured(order: RunPeaks) -> Peaks:
    """The machine's peaks, in less than ten seconds after the engine is loaded.

    The torch backend measures them for variants of every backend: they are the machine's. Raises UnsupportedError
    when there is no such device.
    """
    backend = BACKENDS["torch"]
    backend.use_threads(order.threads)
    raise_priority()
    return backend.peaks(order.device, order.threads)


if __name__ == "__main__":
    main()
