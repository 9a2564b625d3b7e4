"""The scratch folder of a job, and the temporary folders of its processes."""

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from optigpu.paths import data_dir, plain_path
from optigpu.vocabulary import ReplicateError

ABANDONED_S = 2 * 86400.0
"""A scratch folder that has not changed for so long belongs to a worker that was killed."""


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder for one job, removed after it. It is on disk, because the logits in it may not fit into memory."""
    root = _root()
    for folder in root.iterdir():
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime > ABANDONED_S:
                shutil.rmtree(folder)
    with tempfile.TemporaryDirectory(prefix="job-", dir=root, ignore_cleanup_errors=True) as folder_name:
        yield Path(folder_name)


def temporary_folder() -> Path:
    """A new folder for the temporary files of one process, to be removed by who asks for it.

    It lies beside the jobs' folders, so that one which a killed worker left is removed as theirs are. Raises
    ReplicateError when it cannot be made.
    """
    try:
        return Path(tempfile.mkdtemp(prefix="tmp-", dir=_root()))
    except OSError as error:
        raise ReplicateError(
            f"No temporary directory for the measuring process can be made in {data_dir()} ({error.strerror})."
        ) from error


def _root() -> Path:
    root = plain_path(data_dir()) / "scratch"
    root.mkdir(parents=True, exist_ok=True)
    return root
