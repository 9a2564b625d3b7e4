"""Runs converters' programs one after the other, so that torch and the engines' libraries are loaded once.

A line of stdin is a module with its arguments and the environment's variables; the answer is how it ended.
"""

import io
import json
import os
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module


def status_of(module: str, arguments: list[str]) -> int:
    """What the process would have ended with; an exception is printed as Python does."""
    sys.argv = [module, *arguments]
    try:
        return int(import_module(module).main())
    except SystemExit as end:
        return int(end.code or 0)
    except Exception:
        traceback.print_exc()
        return 1


answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # libraries print there
for line in sys.stdin:
    module, arguments, variables = json.loads(line)
    os.environ.clear()
    os.environ.update(variables)
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = status_of(module, arguments)
    print(json.dumps([status, out.getvalue(), err.getvalue()]), file=answers, flush=True)
