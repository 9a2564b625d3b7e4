"""A converter's program that ends as its argument says."""

import os
import signal
import sys

from optigpu.backends.converted import REFUSED


def main() -> int:
    match sys.argv[1]:
        case "refuse":
            print(f"No {os.environ['OPTIGPU_TEST_WHAT']}.")
            return REFUSED
        case "raise":
            raise ValueError("no such layer")
        case "exit":
            sys.exit(2)
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
    print(os.getpid())
    return 0


if __name__ == "__main__":
    sys.exit(main())
