"""llama-bench, llama.cpp's own benchmark, on the variant's file: decode steps after a context as long as the prompt.

The Python package has no llama-bench. It is built from the package's source, of the same version and for the same CPU.
"""

import json
import shutil
import subprocess
from collections.abc import Sequence

from benchmarks.own_tools.asked import Rate, parser, serve, silent
from optigpu.backends.base import Order
from optigpu.vocabulary import UnsupportedError

NAME = "llama-bench"


def benched(order: Order, program: str) -> Rate:
    """Raises UnsupportedError where the program is not there, or fails."""
    from optigpu.backends.llama_cpp.engine import LLAMA_CPP
    from optigpu.backends.llama_cpp.source import source_of

    where = shutil.which(program)
    if where is None:
        raise UnsupportedError(
            f"{program} is not there; build {NAME} of llama.cpp and name it with --llama-bench."
        )
    path = source_of(order, LLAMA_CPP, LLAMA_CPP.open(), silent).path

    def rate(prompt: Sequence[int], count: int) -> float:
        lengths = ["-p", "0", "-n", str(count - 1), "-d", str(len(prompt))]
        how = ["-t", str(order.threads), "-fa", "1", "-r", "1", "-o", "json"]
        done = subprocess.run([where, "-m", str(path), *lengths, *how], capture_output=True, text=True)
        if done.returncode:
            raise UnsupportedError(
                f"{NAME} failed: {(done.stderr.strip().splitlines() or ['no reason'])[-1]}"
            )
        (test,) = json.loads(done.stdout)
        return float(test["avg_ts"])

    return rate


def main() -> None:
    asked = parser(__doc__)
    asked.add_argument("--llama-bench", default=NAME, help="the program, where it is not on the PATH")
    options = asked.parse_args()
    serve(lambda order: benched(order, options.llama_bench), options)


if __name__ == "__main__":
    main()
