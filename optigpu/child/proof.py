"""python -m optigpu.child.proof: the process in which a device shows that it can compute.

It reads one `RunProof` from stdin and answers with `Proven` or `Broken`, as `optigpu.child.connection` says.
"""

from typing import NoReturn

from optigpu.child.connection import broken, connect
from optigpu.child.messages import Proven, RunProof


def main() -> NoReturn:
    """Answers each order, for ever: the thread that reads stdin ends the process."""
    lines, tell = connect("optigpu.child.proof", "Multiplies two small matrices on a device.")
    while True:
        line = lines.get()
        try:
            tell(proven(RunProof.model_validate_json(line)))
        except Exception as error:
            tell(broken(error))


def proven(order: RunProof) -> Proven:
    """Computes in torch, for workers of every backend: it is the device that is in question."""
    from optigpu.backends.torch.device import multiply  # a torch that cannot be loaded is an answer as well

    multiply(order.device)
    return Proven()


if __name__ == "__main__":
    main()
