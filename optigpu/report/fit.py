"""The table of what fits a GPU."""

from optigpu.fit.fitting import Fit, StackFit
from optigpu.fit.training import FitOfTraining, TrainingFit
from optigpu.report.formats import Column, Grid
from optigpu.report.numbers import MISSING, short


def fit_grid(found: Fit) -> Grid:
    """A row for each stack: predicted bytes for the asked load, and how far the card would go."""
    return Grid(
        title=(
            f"{found.model} on {found.gpu}: predicted memory of {found.batch} x {found.context:,} tokens, "
            f"{found.usable_bytes / 2**30:.2f} of {found.memory_bytes / 2**30:.0f} GiB usable"
        ),
        columns=(
            Column("stack"),
            Column("fits"),
            Column("weights", right=True),
            Column("cache", right=True),
            Column("activations", right=True),
            Column("peak (GB)", right=True),
            Column("most tokens", right=True),
            Column("most sequences", right=True),
        ),
        rows=tuple(_row(row) for row in found.stacks),
        notes=(
            *(f"{row.label}: {row.reason}" for row in found.stacks if row.reason),
            *found.advice,
            f"Most tokens are those of one sequence, most sequences those of {found.context:,} tokens.",
            "All figures are predicted from shapes, none is measured; docs/fit.md has their errors.",
        ),
        faint=frozenset(index for index, row in enumerate(found.stacks) if not row.fits),
    )


def _row(row: StackFit) -> tuple[str, ...]:
    if row.peak_bytes is None:
        return (row.label, "not predicted", *[MISSING] * 6)
    sizes = (row.weight_bytes, row.cache_bytes, row.activation_bytes, row.peak_bytes)
    fits = "on the host" if row.host else "yes" if row.fits else "no"
    return (
        row.label,
        fits,
        *(short(size / 1e9) if size is not None else MISSING for size in sizes),
        *(_count(count) for count in (row.largest_context, row.largest_batch)),
    )


def _count(number: int | None) -> str:
    """How many; a dash where the card does not limit it."""
    return MISSING if number is None else f"{number:,}"


def training_grid(found: FitOfTraining) -> Grid:
    """A row for each stack of training."""
    return Grid(
        title=(
            f"Training {found.model} on {found.gpu}: predicted memory of {found.batch} x {found.sequence_tokens:,} "
            f"tokens, {found.usable_bytes / 2**30:.2f} of {found.memory_bytes / 2**30:.0f} GiB usable"
        ),
        columns=(
            Column("stack"),
            Column("fits"),
            Column("weights", right=True),
            Column("optimizer", right=True),
            Column("step", right=True),
            Column("peak (GB)", right=True),
            Column("most rows", right=True),
        ),
        rows=tuple(_training_row(row) for row in found.stacks),
        notes=(
            *(f"{row.label}: {row.reason}" for row in found.stacks if row.reason),
            "Step: gradients and activations at the peak. All figures are predicted, none is measured; docs/fit.md has "
            "their errors.",
        ),
        faint=frozenset(index for index, row in enumerate(found.stacks) if not row.fits),
    )


def _training_row(row: TrainingFit) -> tuple[str, ...]:
    if row.peak_bytes is None:
        return (row.label, "not predicted", *[MISSING] * 5)
    sizes = (row.weight_bytes, row.state_bytes, row.step_bytes, row.peak_bytes)
    figures = (short(size / 1e9) if size is not None else MISSING for size in sizes)
    return (row.label, "yes" if row.fits else "no", *figures, _count(row.largest_batch))
