"""The command `optigpu` in this process, which saves its start; processes that measure for it are real ones."""

import io
import os
import subprocess
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from optigpu.cli import main


def optigpu(
    variables: Mapping[str, str], *arguments: str, folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs it with `variables` besides those of this process, in `folder`."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        for name, value in variables.items():
            if os.environ.get(name) != value:
                patch.setenv(name, value)
        if folder:
            patch.chdir(folder)
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
    status = ended.value.code
    return subprocess.CompletedProcess(arguments, int(status or 0), out.getvalue(), err.getvalue())
