"""What a job needs once before its variants: a scratch folder, the machine's peaks, the reference for quality."""

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
from optigpu.conductor.processes.residents import Bench
from optigpu.documents.peaks import Peaks
from optigpu.job.spec import Variant
from optigpu.models.reference import parse_reference
from optigpu.paths import data_dir
from optigpu.vocabulary import DeadlineError, ReplicateError, Role, UnsupportedError

REFERENCE_BACKEND = "torch"
"""Makes the reference for variants of every backend, so that their quality is a distance from the same predictions."""
ABANDONED_S = 2 * 86400.0
"""A scratch folder that nobody wrote to for so long belongs to a worker that was killed."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Preparation:
    """What was found before the first variant. `peaks` is null where the machine could not be measured."""

    peaks: Peaks | None


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder for one job, removed after it; on disk, because the logits in it may be more than the memory holds."""
    root = data_dir() / "scratch"
    root.mkdir(parents=True, exist_ok=True)
    for folder in root.iterdir():
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime > ABANDONED_S:
                shutil.rmtree(folder)
    with tempfile.TemporaryDirectory(prefix="job-", dir=root, ignore_cleanup_errors=True) as folder_name:
        yield Path(folder_name)


def prepare(bench: Bench, variants: Sequence[Variant]) -> Preparation:
    """The peaks, and the reference on disk. A failure of either costs the metrics that need it, nothing else."""
    if not variants:
        return Preparation(None)
    first = variants[0]
    bench.watch.at(first.index, 0, "preparing")
    peaks = measured_peaks(
        bench.environment, bench.spec.device, bench.threads, bench.watch, keep=bench.descriptors
    )
    if "quality" in bench.spec.measure.meters and _has_quality(first):
        _make_reference(bench, first)
    return Preparation(peaks)


def _has_quality(variant: Variant) -> bool:
    """Random weights have no quality, and without a model there is none."""
    return variant.model is not None and parse_reference(variant.model).kind != "preset"


def _make_reference(bench: Bench, like: Variant) -> None:
    """The plain fp32 model leaves its logits in the folder; where it cannot, the quality meter says that it did not."""
    bench.watch.doing("making the reference for quality")
    plain = {"role": Role.BASELINE, "stack": (), "label": "baseline", "backend": REFERENCE_BACKEND}
    baseline = like.model_copy(update=plain)
    try:
        with bench.child() as child:
            ask(child, bench.assignment(baseline, 0), Ready, bench.watch)
            ask(child, RunReference(), Metered, bench.watch)
    except DeadlineError:
        raise
    except (UnsupportedError, ReplicateError) as error:
        _log.warning("no reference for quality: %s", error)
