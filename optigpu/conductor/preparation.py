"""What a job needs once before its variants: a scratch folder, the machine's peak rates, the quality reference."""

import logging
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from optigpu.child.messages import Metered, Ready, RunReference
from optigpu.conductor.peak_cache import measured_peaks
from optigpu.conductor.processes.asking import ask
from optigpu.conductor.session import Session
from optigpu.documents.peaks import Peaks
from optigpu.job.spec import Variant
from optigpu.models.reference import parse_reference
from optigpu.paths import data_dir
from optigpu.vocabulary import DeadlineError, ReplicateError, Role, UnsupportedError

ABANDONED_S = 2 * 86400.0
"""A scratch folder that has not changed for so long belongs to a worker that was killed."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Preparation:
    """What was measured before the first variant."""

    # None if the machine's peak rates could not be measured.
    peaks: Peaks | None


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


def prepare(session: Session, variants: Sequence[Variant]) -> Preparation:
    """Measures the peak rates and writes the quality reference. If one fails, the metrics that need it are missing."""
    if not variants:
        return Preparation(None)
    first = variants[0]
    session.progress.begin(first.index, 0, "preparing")
    peaks = measured_peaks(
        session.environment, session.spec.device, session.threads, session.progress, keep=session.descriptors
    )
    if "quality" in session.spec.measure.meters and _has_quality(first):
        _make_reference(session, first)
    return Preparation(peaks)


def _has_quality(variant: Variant) -> bool:
    """Only trained weights have a quality to measure."""
    return variant.model is not None and parse_reference(variant.model).kind != "preset"


def _make_reference(session: Session, like: Variant) -> None:
    """The plain fp32 model writes its logits into the folder; without them, the quality meter says what is missing."""
    session.progress.show("computing the quality reference")
    baseline = like.model_copy(update={"role": Role.BASELINE, "stack": (), "label": "baseline"})
    try:
        with session.child(baseline) as child:
            ask(child, session.assignment(baseline, 0), Ready, session.progress)
            ask(child, RunReference(), Metered, session.progress)
    except DeadlineError:
        raise
    except (UnsupportedError, ReplicateError) as error:
        _log.warning("the quality reference could not be computed: %s", error)
