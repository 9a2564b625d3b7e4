"""Whether a model fits a board, before it is flashed: flash, SRAM, PSRAM, and the latency to expect."""

from enum import StrEnum

from optigpu.documents.fields import closest, did_you_mean
from optigpu.documents.manifest import ModelManifest
from optigpu.edge.prediction import ClaimCheck, Prediction, check_claim, predict
from optigpu.edge.tflite import operators
from optigpu.hardware.boards import Board, board, boards
from optigpu.vocabulary import Frozen, SpecError


class Place(StrEnum):
    """Where something lies on a board."""

    SRAM = "sram"
    PSRAM = "psram"


class BoardFit(Frozen):
    """What a board has for a model, and where the parts of it go.

    `flash_left_bytes` is negative by what is missing. `arena` is null where the arena fits nowhere, and
    `model_in_ram` says where a runner that reads the model from a file can keep it beside the arena. `reasons` say why
    the model does not fit, or what costs speed.
    """

    board: str
    module: str
    flash_bytes: int
    flash_left_bytes: int
    sram_bytes: int
    psram_bytes: int
    arena: Place | None
    model_in_ram: Place | None
    fits: bool
    reasons: tuple[str, ...]


class Fit(Frozen):
    """A model beside boards. `prediction` and `claim` are null for a model without MACs.

    `unaccelerated` are the operators for which ESP-NN has no kernel.
    """

    model: str
    sha256: str
    model_bytes: int
    arena_bytes: int
    macs: int
    unaccelerated: tuple[str, ...]
    boards: tuple[BoardFit, ...]
    prediction: Prediction | None
    claim: ClaimCheck | None


def fit(manifest: ModelManifest, only: str | None = None) -> Fit:
    """The verdicts for all boards, or for one. Raises SpecError for a board that is not listed."""
    found = board(only) if only is not None else None
    if only is not None and found is None:
        names = [each.id for each in boards()]
        meant = did_you_mean(closest(only, names))
        raise SpecError(f"Unknown board {only!r}.{meant} Valid: {', '.join(names)}.")
    macs, names = manifest.macs, [each.name for each in manifest.operators]
    claimed = macs and manifest.network.family == "mobilenet_v2"
    return Fit(
        model=manifest.network.label,
        sha256=manifest.sha256,
        model_bytes=manifest.model_bytes,
        arena_bytes=manifest.arena_bytes,
        macs=macs,
        unaccelerated=tuple(name for name in names if name not in operators().esp_nn.operators),
        boards=tuple(
            fit_board(manifest.model_bytes, manifest.arena_bytes, each)
            for each in ((found,) if found else boards())
        ),
        prediction=predict(macs) if macs else None,
        claim=check_claim(macs) if claimed else None,
    )


def fit_board(model_bytes: int, arena_bytes: int, place: Board) -> BoardFit:
    """The verdict for one board. The model stays in flash; only its arena needs memory."""
    left, sram = place.flash_for_model_bytes - model_bytes, place.sram_for_arena_bytes
    arena = Place.SRAM if arena_bytes <= sram else Place.PSRAM if arena_bytes <= place.psram_bytes else None
    in_psram = model_bytes + (arena_bytes if arena is Place.PSRAM else 0)
    model = Place.PSRAM if arena is not None and in_psram <= place.psram_bytes else None
    if model_bytes + arena_bytes <= sram:
        model = Place.SRAM
    return BoardFit(
        board=place.id,
        module=place.module,
        flash_bytes=place.flash_bytes,
        flash_left_bytes=left,
        sram_bytes=sram,
        psram_bytes=place.psram_bytes,
        arena=arena,
        model_in_ram=model,
        fits=left >= 0 and arena is not None,
        reasons=tuple(_reasons(left, arena_bytes, arena, place)),
    )


def _reasons(left: int, arena_bytes: int, arena: Place | None, place: Board) -> list[str]:
    reasons = []
    if left < 0:
        reasons.append(
            f"The model is {-left:,} bytes larger than the flash that firmware and agent leave; "
            "use a narrower network or a board with more flash."
        )
    if arena is None:
        most = max(place.sram_for_arena_bytes, place.psram_bytes)
        reasons.append(
            f"The tensor arena of {arena_bytes:,} bytes fits neither SRAM nor PSRAM, {most:,} bytes at most; "
            "use a smaller input or a board with PSRAM."
        )
    if arena is Place.PSRAM:
        reasons.append(f"The tensor arena lies in {place.psram_bus} PSRAM, which is slower than SRAM.")
    return reasons
