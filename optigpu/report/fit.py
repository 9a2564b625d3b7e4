"""The tables of what fits a GPU; and those of a model for a microcontroller: what it is, which boards hold it, how fast
it should be there."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

from optigpu.documents.manifest import ModelManifest
from optigpu.edge.fit import BoardFit, Prediction, sources
from optigpu.edge.fit import Fit as FitOfBoards
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


def manifest_grid(manifest: ModelManifest) -> Grid:
    """A row for each thing that a manifest says."""
    rows = tuple(_manifest_rows(manifest))
    notes = (
        [] if manifest.rankable else ["Calibrated with random inputs: results of this model are not ranked."]
    )
    if manifest.network.weights == "random":
        notes.append(
            "Random weights: right for speed and memory; classes and agreement with FP32 mean nothing."
        )
    return Grid(manifest.network.label, columns("what", "value"), rows, tuple(notes))


def board_grid(found: FitOfBoards) -> Grid:
    """A row for each board; the notes say what the prediction rests on."""
    return Grid(
        title=f"{found.model} on ESP32-S3 boards (latency: prediction, not measured)",
        columns=columns(
            "board",
            "fits",
            "flash left (KB):",
            "arena in",
            "model in RAM",
            "predicted (ms):",
            "max FPS:",
            "why, or what to know",
        ),
        rows=tuple(_fit_cells(each, found.prediction) for each in found.boards),
        notes=tuple(_board_notes(found)),
        faint=frozenset(number for number, each in enumerate(found.boards) if not each.fits),
    )


def board_records(found: FitOfBoards) -> list[dict[str, object]]:
    """The same as raw values, for CSV."""
    prediction = found.prediction
    latency = {
        "predicted_low_s": prediction.low_s if prediction else None,
        "predicted_high_s": prediction.high_s if prediction else None,
        "predicted_max_fps": prediction.max_fps if prediction else None,
    }
    return [each.model_dump(mode="json") | latency for each in found.boards]


@contextmanager
def conversion_progress(console: Console) -> Iterator[Callable[[str], None]]:
    """Yields what is told each step of a conversion: it shows a spinner on a terminal, else a line for each."""
    if not console.is_terminal:
        yield lambda text: console.print(Text(text))
        return
    with console.status("starting") as status:
        yield lambda text: status.update(Text(text))


def _manifest_rows(manifest: ModelManifest) -> Iterator[tuple[str, str]]:
    agreement, calibration = manifest.agreement, manifest.calibration
    yield "SHA-256", manifest.sha256
    yield "model", f"{manifest.model_bytes:,} bytes, {manifest.parameter_bytes:,} of them parameters"
    yield "tensor arena", f"{manifest.arena_bytes:,} bytes"
    yield "MACs", f"{manifest.macs:,}"
    yield "operators", ", ".join(f"{each.name} x{each.count}" for each in manifest.operators)
    for name, tensor in (("input", manifest.input), ("output", manifest.output)):
        shape = "x".join(map(str, tensor.shape))
        yield name, f"int8 {shape}, scale {tensor.scale:.6g}, zero point {tensor.zero_point}"
    if agreement.top1 is None or agreement.kld_mean is None:
        yield "agreement with FP32", f"{MISSING} ({agreement.reason})"
    else:
        yield (
            "agreement with FP32",
            f"top-1 {agreement.top1:.1%}, KLD {agreement.kld_mean:.3g} on {agreement.samples} held-out inputs",
        )
    yield "calibrated with", f"{calibration.samples} samples ({calibration.kind})"
    left_out = f" ({manifest.golden.left_out} left out)" if manifest.golden.left_out else ""
    yield (
        "golden vectors",
        f"{manifest.golden.count}, equal bit for bit on TFLite Micro and LiteRT's reference kernels{left_out}",
    )
    yield "made with", ", ".join(f"{name} {version}" for name, version in manifest.tools.items())


def _fit_cells(each: BoardFit, prediction: Prediction | None) -> tuple[str, ...]:
    latency = (
        f"{short(prediction.low_s * 1e3)} to {short(prediction.high_s * 1e3)}" if prediction else MISSING
    )
    return (
        each.board,
        "yes" if each.fits else "no",
        f"{each.flash_left_bytes / 1e3:,.0f}",
        MISSING if each.arena is None else each.arena.upper(),
        MISSING if each.model_in_ram is None else each.model_in_ram.upper(),
        latency if each.fits else MISSING,
        short(prediction.max_fps) if prediction and each.fits else MISSING,
        " ".join(each.reasons),
    )


def _board_notes(found: FitOfBoards) -> Iterator[str]:
    yield (
        f"Model {found.model_bytes:,} bytes, tensor arena {found.arena_bytes:,} bytes, {found.macs:,} MACs. Flash is "
        "what firmware and agent leave; the model stays in flash unless a runner reads it from a file (model in RAM)."
    )
    prediction = found.prediction
    if prediction is None:
        yield "No prediction: the model has no multiply-accumulates, and published figures are for networks that have."
        return
    yield (
        f"Prediction for TFLite Micro with ESP-NN on one core at {prediction.clock_hz / 1e6:.0f} MHz, "
        f"{short(prediction.low_s * 1e3)} to {short(prediction.high_s * 1e3)} ms, from published figures:"
    )
    yield from (f"  {sentence}" for sentence in sources([prediction]))
    if found.unaccelerated:
        yield f"ESP-NN has no kernel for {', '.join(found.unaccelerated)}: these run on TFLite Micro's own."
    if found.claim is not None:
        yield found.claim.sentence
        yield f"  {found.claim.published.sentence}"
