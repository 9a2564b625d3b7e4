"""The tables of what fits a GPU."""

from collections.abc import Sequence

from optigpu.fit.fitting import Fit, StackFit
from optigpu.fit.several import FitOfSeveral
from optigpu.fit.training import FitOfTraining, TrainingFit
from optigpu.report.formats import Grid, columns
from optigpu.report.numbers import MISSING, short


def fit_grid(found: Fit) -> Grid:
    """A row for each stack: predicted bytes for the asked load, and how far the card would go."""
    return _grid(
        found,
        f"{found.model} on {found.gpu}: predicted memory of {found.batch} x {found.context:,} tokens",
        ("weights", "cache", "activations", "peak (GB)", "most tokens", "most sequences"),
        [_row(row) for row in found.stacks],
        (
            *found.advice,
            f"Most tokens are those of one sequence, most sequences those of {found.context:,} tokens.",
            "All figures are predicted from shapes, none is measured; docs/fit.md has their errors.",
        ),
    )


def training_grid(found: FitOfTraining) -> Grid:
    """A row for each stack of training."""
    return _grid(
        found,
        f"Training {found.model} on {found.gpu}: predicted memory of {found.batch} x {found.sequence_tokens:,} tokens",
        ("weights", "optimizer", "step", "peak (GB)", "most rows"),
        [_training_row(row) for row in found.stacks],
        (
            "Step: gradients and activations at the peak. All figures are predicted, none is measured; docs/fit.md has "
            "their errors.",
        ),
    )


def several_grid(found: FitOfSeveral) -> Grid:
    """A row for each division of the model over several GPUs."""
    title = (
        f"{found.model}, {found.stack}, over several {found.gpu}: predicted for a GPU, {found.batch} x "
        f"{found.context:,} tokens"
    )
    return Grid(
        title=title,
        columns=columns(
            "GPUs:",
            "tensor:",
            "pipeline:",
            "fits",
            "weights:",
            "cache:",
            "peak (GB):",
            "sent a step (MB):",
            "reading (ms):",
            "sending (ms):",
        ),
        rows=tuple(
            (
                *map(str, (each.gpus, each.tensor, each.pipeline)),
                "yes" if each.fits else "no",
                *(short(size / 1e9) for size in (each.weight_bytes, each.cache_bytes, each.peak_bytes)),
                short(each.sent_bytes_per_step / 1e6),
                *(MISSING if time is None else short(1e3 * time) for time in (each.read_s, each.sent_s)),
            )
            for each in found.divisions
        ),
        notes=(
            *found.reasons.values(),
            "Reading and sending: the least that a decode step takes of each; how far they overlap is not predicted.",
            "All figures are predicted from shapes and the catalog, none is measured.",
        ),
        faint=frozenset(index for index, each in enumerate(found.divisions) if not each.fits),
    )


def _grid(
    found: Fit | FitOfTraining,
    title: str,
    figures: Sequence[str],
    rows: Sequence[tuple[str, ...]],
    notes: Sequence[str],
) -> Grid:
    """Stacks that do not fit are faint, and the reasons of those that were not predicted come first in the notes."""
    stacks: Sequence[StackFit | TrainingFit] = found.stacks
    usable = f"{found.usable_bytes / 2**30:.2f} of {found.memory_bytes / 2**30:.0f} GiB usable"
    return Grid(
        title=f"{title}, {usable}",
        columns=columns("stack", "fits", *(f"{figure}:" for figure in figures)),
        rows=tuple(rows),
        notes=(*(f"{row.label}: {row.reason}" for row in stacks if row.reason), *notes),
        faint=frozenset(index for index, row in enumerate(stacks) if not row.fits),
    )


def _row(row: StackFit) -> tuple[str, ...]:
    if row.peak_bytes is None:
        return (row.label, "not predicted", *[MISSING] * 6)
    sizes = (row.weight_bytes, row.cache_bytes, row.activation_bytes, row.peak_bytes)
    fits = "on the host" if row.host else "yes" if row.fits else "no"
    return (row.label, fits, *map(_gigabytes, sizes), *map(_count, (row.largest_context, row.largest_batch)))


def _training_row(row: TrainingFit) -> tuple[str, ...]:
    if row.peak_bytes is None:
        return (row.label, "not predicted", *[MISSING] * 5)
    sizes = (row.weight_bytes, row.state_bytes, row.step_bytes, row.peak_bytes)
    return (row.label, "yes" if row.fits else "no", *map(_gigabytes, sizes), _count(row.largest_batch))


def _gigabytes(size: float | None) -> str:
    return MISSING if size is None else short(size / 1e9)


def _count(number: int | None) -> str:
    """How many; a dash where the card does not limit it."""
    return MISSING if number is None else f"{number:,}"
