"""Runs suites in this interpreter, whichever it is: a line `ok` or `failed` for each function."""

import gc
import sys

SUITES = "tests.edge.core.suites."
HELPERS = ("machine", "service", "agents")
CORE = ("timing", "measuring", "keys", "session", "queue", "message", "enrolment", "agent")


IS_SMALL = hasattr(gc, "mem_free")  # MicroPython


def load(names=CORE, package="esp32_agent.core."):
    """Imports modules with the garbage of each import collected, so that a small heap stays in one piece."""
    for name in names:
        __import__(package + name)
        if IS_SMALL:
            gc.collect()


def prepared(name):
    """The suite, with all that it needs imported and the garbage collected early from now on."""
    load()
    load(HELPERS, SUITES)
    load((name,), SUITES)
    if IS_SMALL:
        gc.threshold(2048)
    return sys.modules[SUITES + name]


def run(name, wanted=""):
    """Runs the suite, or one function of it."""
    suite = prepared(name)
    for function in dir(suite):
        if function.startswith("test_") and wanted in ("", function):
            try:
                getattr(suite, function)()
            except Exception as error:
                print("failed", name, function)
                sys.print_exception(error)
            else:
                print("ok", name, function)
