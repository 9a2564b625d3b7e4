"""The scratch folder of a job."""

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from optigpu.paths import data_dir

ABANDONED_S = 2 * 86400.0
"""A scratch folder that has not changed for so long belongs to a worker that was killed."""


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder for one job, removed after it. It is on disk, because the logits in it may not fit into memory."""
    root = data_dir() / "scratch"
    root.mkdir(parents=True, exist_ok=True)
    for folder in root.iterdir():
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime > ABANDONED_S:
                shutil.rmtree(folder)
    with tempfile.TemporaryDirectory(prefix="job-", dir=root, ignore_cleanup_errors=True) as folder_name:
        yield Path(folder_name)
