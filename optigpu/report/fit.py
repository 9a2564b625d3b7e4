"""The tables of what fits a GPU; and those of a model for a microcontroller: what it is, which boards hold it, how fast
it should be there."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from optigpu.documents.manifest import ModelManifest
from optigpu.edge.fit import Fit as FitOfBoards
from optigpu.fit.fitting import Fit, FitOfSeveral, StackFit
from optigpu.fit.memory import FitOfTraining, TrainingFit
from optigpu.report.formats import MISSING, Grid, columns, short, tabulated

Stack = TypeVar("Stack", bound=StackFit | TrainingFit)


def fit_grid(found: Fit) -> Grid:
    """A row for each stack: predicted bytes for the asked load, and how far the card would go."""
    return _grid(
        found,
        f"{found.model} on {found.gpu}: predicted memory of {found.batch} x {found.context:,} tokens",
        found.stacks,
        {
            "stack": lambda row: row.label,
            "fits": lambda row: _fits(row, "on the host" if row.host else "yes"),
            "weights:": lambda row: _gigabytes(row.weight_bytes),
            "cache:": lambda row: _gigabytes(row.cache_bytes),
            "activations:": lambda row: _gigabytes(row.activation_bytes),
            "peak (GB):": lambda row: _gigabytes(row.peak_bytes),
            "most tokens:": lambda row: _count(row.largest_context),
            "most sequences:": lambda row: _count(row.largest_batch),
        },
        (
            *found.advice,
            f"Most tokens are those of one sequence, most sequences those of {found.context:,} tokens.",
            "All figures are predicted from shapes, not measured; docs/choose.md has their errors.",
        ),
    )


def training_grid(found: FitOfTraining) -> Grid:
    """A row for each stack of training."""
    return _grid(
        found,
        f"Training {found.model} on {found.gpu}: predicted memory of {found.batch} x {found.sequence_tokens:,} tokens",
        found.stacks,
        {
            "stack": lambda row: row.label,
            "fits": lambda row: _fits(row, "yes"),
            "weights:": lambda row: _gigabytes(row.weight_bytes),
            "optimizer:": lambda row: _gigabytes(row.state_bytes),
            "step:": lambda row: _gigabytes(row.step_bytes),
            "peak (GB):": lambda row: _gigabytes(row.peak_bytes),
            "most rows:": lambda row: _count(row.largest_batch),
        },
        (
            "Step: gradients and activations at the peak. All figures are predicted, not measured; docs/choose.md has "
            "their errors.",
        ),
    )


def several_grid(found: FitOfSeveral) -> Grid:
    """A row for each division of the model over several GPUs."""
    title = (
        f"{found.model}, {found.stack}, over several {found.gpu}: predicted for a GPU, {found.batch} x "
        f"{found.context:,} tokens"
    )
    return tabulated(
        title,
        found.divisions,
        {
            "GPUs:": lambda each: str(each.gpus),
            "tensor:": lambda each: str(each.tensor),
            "pipeline:": lambda each: str(each.pipeline),
            "fits": lambda each: "yes" if each.fits else "no",
            "weights:": lambda each: _gigabytes(each.weight_bytes),
            "cache:": lambda each: _gigabytes(each.cache_bytes),
            "peak (GB):": lambda each: _gigabytes(each.peak_bytes),
            "sent a step (MB):": lambda each: short(each.sent_bytes_per_step / 1e6),
            "reading (ms):": lambda each: _milliseconds(each.read_s),
            "sending (ms):": lambda each: _milliseconds(each.sent_s),
        },
        (
            *found.reasons.values(),
            "Reading and sending: the least that a decode step takes of each; how far they overlap is not predicted.",
            "All figures are predicted from shapes and the catalog, none is measured.",
        ),
        faint=lambda each: not each.fits,
    )


def _grid(
    found: Fit | FitOfTraining,
    title: str,
    stacks: Sequence[Stack],
    cells: Mapping[str, Callable[[Stack], str]],
    notes: Sequence[str],
) -> Grid:
    """Stacks that do not fit are faint, and the reasons of those that were not predicted come first in the notes."""
    usable = f"{found.usable_bytes / 2**30:.2f} of {found.memory_bytes / 2**30:.0f} GiB usable"
    reasons = [f"{row.label}: {row.reason}" for row in stacks if row.reason]
    every = (*reasons, *notes)
    return tabulated(f"{title}, {usable}", stacks, cells, every, faint=lambda row: not row.fits)


def _fits(row: StackFit | TrainingFit, where: str) -> str:
    return "not predicted" if row.peak_bytes is None else where if row.fits else "no"


def _gigabytes(size: float | None) -> str:
    return MISSING if size is None else short(size / 1e9)


def _milliseconds(time: float | None) -> str:
    return MISSING if time is None else short(1e3 * time)


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
    prediction = found.prediction
    latency = (
        f"{short(prediction.low_s * 1e3)} to {short(prediction.high_s * 1e3)}" if prediction else MISSING
    )
    most = short(prediction.max_fps if prediction else None)
    return tabulated(
        f"{found.model} on ESP32-S3 boards (latency: prediction, not measured)",
        found.boards,
        {
            "board": lambda each: each.board,
            "fits": lambda each: "yes" if each.fits else "no",
            "flash left (KB):": lambda each: f"{each.flash_left_bytes / 1e3:,.0f}",
            "arena in": lambda each: MISSING if each.arena is None else each.arena.upper(),
            "model in RAM": lambda each: MISSING if each.model_in_ram is None else each.model_in_ram.upper(),
            "predicted (ms):": lambda each: latency if each.fits else MISSING,
            "max FPS:": lambda each: most if each.fits else MISSING,
            "why, or what to know": lambda each: " ".join(each.reasons),
        },
        tuple(_board_notes(found)),
        faint=lambda each: not each.fits,
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
    yield from (f"  {each.sentence}" for each in prediction.figures)
    if found.unaccelerated:
        yield f"ESP-NN has no kernel for {', '.join(found.unaccelerated)}: these run on TFLite Micro's own."
    if found.claim is not None:
        yield found.claim.sentence
        yield f"  {found.claim.published.sentence}"
