"""Runs suites in this interpreter, whichever it is: `ok` or `failed` with suite and function, a line for each."""

import sys

SUITES = "tests.edge.core.suites."


def run(name: str) -> None:
    __import__(SUITES + name)
    suite = sys.modules[SUITES + name]
    for function in dir(suite):
        if not function.startswith("test_"):
            continue
        try:
            getattr(suite, function)()
        except Exception as error:
            print("failed", name, function, type(error).__name__)
            show(error)
        else:
            print("ok", name, function)


def show(error: Exception) -> None:
    """The traceback, on stdout."""
    if hasattr(sys, "print_exception"):
        sys.print_exception(error)
    else:
        raise error


if __name__ == "__main__":
    for each in sys.argv[1:]:
        run(each)
