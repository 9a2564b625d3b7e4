"""The reference of a job: the fp32 model's predictions for each passage, stored on disk and read row by row."""

import hashlib
import shutil
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from optigpu.documents.facts import WeightFacts
from optigpu.paths import Bound, BoundedFolder, bytes_of, cache_dir, mark_used
from optigpu.quality.divergence import Agreement, Logits, log_likelihood
from optigpu.quality.passages import Passage, Prediction, digest_of, pack, unpack
from optigpu.quality.told import Bounded, Told, expected_by_logits
from optigpu.vocabulary import Frozen, OptiGPUError, UnsupportedError, canonical_json

MOST_LOGIT_BYTES = 4 * 2**30
"""The most bytes of logits that a job keeps on disk; further positions count for perplexity and accuracy only."""
_ITEM_BYTES = 4

_MANIFEST, _REASON = "manifest.json", "reason.txt"
_PASSAGES, _LIKELIHOODS, _LOGITS = "passages.npz", "likelihoods.npy", "logits.f32"
_SUFFIX = ".reference"
LOCK_TIMEOUT_S = 60


class Setting(Frozen):
    """What only variants with the same can be compared with. `window` and `stride` are in tokens.

    `stride` is null for texts that are no sequence of windows; `dataset_sha256` for what the model writes itself.
    """

    model: str
    seed: int
    text: str
    tokens: int
    items: int
    window: int
    stride: int | None
    vocabulary: int
    dataset_sha256: str | None


class Manifest(Frozen):
    """Of a reference. The first `compared` of `positions` have logits on disk; `cut` counts contexts that were cut."""

    setting: Setting
    origin: str | None
    passages_sha256: str
    positions: int
    compared: int
    cut: int = 0


class LogitsFile(AbstractContextManager["LogitsFile"]):
    """Raw float32 logits, one row of `vocabulary` numbers for each position; only one row is in memory at a time."""

    def __init__(self, path: Path, vocabulary: int, *, new: bool = False) -> None:
        self._file = path.open("w+b" if new else "rb")
        self._row_bytes = vocabulary * _ITEM_BYTES

    def write(self, position: int, logits: NDArray[np.float32]) -> None:
        """`logits`: [vocabulary]. Raises OptiGPUError if the length differs."""
        row = np.ascontiguousarray(logits, "<f4")
        if row.nbytes != self._row_bytes:
            raise OptiGPUError(
                f"The model gives {row.size} logits, but its configuration says {self._row_bytes // _ITEM_BYTES}."
            )
        self._file.seek(position * self._row_bytes)
        self._file.write(row.data)

    def read(self, position: int) -> NDArray[np.float32]:
        """Logits [vocabulary] of a position. Raises OptiGPUError if the file ends before it."""
        self._file.seek(position * self._row_bytes)
        content = self._file.read(self._row_bytes)
        if len(content) != self._row_bytes:
            raise OptiGPUError("The file of reference logits is truncated; run the job again.")
        return np.frombuffer(content, "<f4")

    def __exit__(self, *_: object) -> None:
        self._file.close()


@dataclass(frozen=True)
class Reference:
    """An opened reference; `likelihoods` [positions] are the fp32 model's log-likelihoods of the predicted tokens."""

    manifest: Manifest
    passages: list[Passage]
    likelihoods: NDArray[np.float64]
    _logits: Path

    def judge(self, predictions: Iterable[Prediction]) -> tuple[Agreement, NDArray[np.float64]]:
        """The divergence and log-likelihoods [positions] of predictions; a position without one has NaN. Raises
        OptiGPUError for NaN or infinity in one."""
        agreement, likelihoods = Agreement(), np.full(self.manifest.positions, np.nan)
        with LogitsFile(self._logits, self.manifest.setting.vocabulary) as logits:
            for prediction in predictions:
                likelihoods[prediction.position] = log_likelihood(prediction.logits, prediction.target)
                if prediction.position < self.manifest.compared:
                    expected = logits.read(prediction.position)
                    agreement.add(expected, prediction.logits, prediction.position)
        return agreement, likelihoods

    def judge_told(self, told: Iterable[Told]) -> tuple[Bounded, NDArray[np.float64]]:
        """As `judge`, of what a server tells: a token that it did not tell has a log-likelihood of minus infinity."""
        bounded, likelihoods = Bounded(), np.full(self.manifest.positions, np.nan)
        with LogitsFile(self._logits, self.manifest.setting.vocabulary) as logits:
            for each in told:
                likelihoods[each.position] = each.log_likelihood
                if each.position < self.manifest.compared:
                    bounded.add(expected_by_logits(logits.read(each.position), each), each)
        return bounded, likelihoods


def write_reference(
    folder: Path, manifest: Manifest, passages: list[Passage], predictions: Iterable[Prediction]
) -> None:
    """Writes the files of `open_reference`, the manifest last. Raises OptiGPUError for too little room, NaN or
    infinity."""
    needed = manifest.compared * manifest.setting.vocabulary * _ITEM_BYTES
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OptiGPUError(
            f"The reference's logits need {needed / 1e9:.1f} GB on disk, but only {free / 1e9:.1f} GB are free; ask "
            "for fewer quality.tokens."
        )
    likelihoods = np.full(manifest.positions, np.nan)
    with LogitsFile(folder / _LOGITS, manifest.setting.vocabulary, new=True) as logits:
        for prediction in predictions:
            likelihoods[prediction.position] = log_likelihood(prediction.logits, prediction.target)
            if prediction.position < manifest.compared:
                logits.write(prediction.position, prediction.logits)
    arrays: dict[str, Any] = pack(passages)
    np.savez(folder / _PASSAGES, **arrays)
    np.save(folder / _LIKELIHOODS, likelihoods)
    (folder / _MANIFEST).write_text(manifest.model_dump_json())


def describe(
    setting: Setting, passages: list[Passage], most_compared: int, origin: str | None = None, cut: int = 0
) -> Manifest:
    """The manifest of a reference for these passages, with logits of at most `most_compared` positions."""
    positions = sum(passage.positions for passage in passages)
    fit = MOST_LOGIT_BYTES // (setting.vocabulary * _ITEM_BYTES)
    return Manifest(
        setting=setting,
        origin=origin,
        passages_sha256=digest_of(passages),
        positions=positions,
        compared=min(positions, most_compared, fit),
        cut=cut,
    )


BOUND = Bound("OPTIGPU_REFERENCES_GB", default=4 * 2**30, files="quality references")
REFERENCE_METHOD = 2
"""Part of a kept reference's key. Increase it when the way of making one changes."""
_KEPT_FILES = (_PASSAGES, _LIKELIHOODS, _LOGITS, _MANIFEST)


def reference_key(setting: Setting, weights: Callable[[], WeightFacts | None], batch: int) -> str | None:
    """By which a reference is kept for later jobs; None where none is kept, or the weights have no hash."""
    found = weights() if _references() else None
    if found is None or found.hash is None:
        return None
    software = {name: version(name) for name in ("torch", "transformers")}
    about = {"method": REFERENCE_METHOD, "weights": found.hash, "batch": batch, "software": software}
    document = about | {"setting": setting.model_dump(mode="json")}
    return hashlib.sha256(canonical_json(document).encode()).hexdigest()


def kept_reference(key: str, folder: Path) -> Manifest | None:
    """The reference of an earlier job, whose files are linked into `folder`; None if there is none that is whole."""
    kept = _references()
    if kept is None:
        return None
    path = kept.path / f"{key}{_SUFFIX}"
    try:
        manifest = Manifest.model_validate_json((path / _MANIFEST).read_bytes())
        logits = manifest.compared * manifest.setting.vocabulary * _ITEM_BYTES
        if (path / _LOGITS).stat().st_size != logits:
            return None
        for name in _KEPT_FILES:
            _link(path / name, folder / name)
    except (OSError, ValidationError):
        for name in _KEPT_FILES:  # what is made anew must not be written into a file that is kept
            (folder / name).unlink(missing_ok=True)
        return None
    mark_used(path)
    return manifest


def keeps_reference(model: str, seed: int, text: str, tokens: int) -> bool:
    """Whether one of these is kept, whatever its weights and windows: a job will likely find its own."""
    kept = _references()
    for path in kept.path.glob(f"*{_SUFFIX}/{_MANIFEST}") if kept else ():
        with suppress(OSError, ValidationError):
            found = Manifest.model_validate_json(path.read_bytes()).setting
            if (found.model, found.seed, found.text, found.tokens) == (model, seed, text, tokens):
                return True
    return False


def keep_reference(key: str, folder: Path) -> None:
    """Keeps the reference in `folder` for later jobs; does nothing where the cache folder cannot be written."""
    kept = _references()
    if kept is None:
        return
    path = kept.path / f"{key}{_SUFFIX}"
    with suppress(OSError, NotImplementedError), kept.locked(LOCK_TIMEOUT_S), kept.draft_of(path) as draft:
        draft.mkdir()
        for name in _KEPT_FILES:
            _link(folder / name, draft / name)
        if bytes_of(draft) <= kept.most:
            kept.admit(draft)


def _references() -> BoundedFolder | None:
    try:
        most = BOUND.most_bytes()
        return BoundedFolder(cache_dir() / "references", _SUFFIX, most) if most else None
    except UnsupportedError:
        return None


def _link(source: Path, target: Path) -> None:
    """The same file where both are on one disk, else a copy."""
    target.unlink(missing_ok=True)
    try:
        target.hardlink_to(source)
    except OSError:
        shutil.copyfile(source, target)


def refuse_reference(folder: Path, reason: str) -> None:
    (folder / _MANIFEST).unlink(missing_ok=True)
    (folder / _REASON).write_text(reason)


def window_of(folder: Path) -> int | None:
    """The window, in tokens, of the reference in `folder`; None if there is none."""
    path = folder / _MANIFEST
    return Manifest.model_validate_json(path.read_bytes()).setting.window if path.is_file() else None


def missing_reference(folder: Path) -> OptiGPUError:
    """An error with the stored reason why there is no reference."""
    reason = folder / _REASON
    why = (
        "There is no fp32 reference to compare with: the process that makes it failed; see the worker's log."
    )
    return OptiGPUError(reason.read_text() if reason.is_file() else why)


def keep_array(folder: Path, name: str, setting: Frozen, array: Logits) -> None:
    np.save(folder / f"{name}.npy", array)
    (folder / f"{name}.json").write_text(setting.model_dump_json())


def kept_array(folder: Path, name: str, setting: Frozen, differs: str) -> Path:
    """The array's file. Raises OptiGPUError without one, and OptiGPUError(differs) for one of another setting."""
    path = folder / f"{name}.json"
    if not path.is_file():
        raise missing_reference(folder)
    if type(setting).model_validate_json(path.read_bytes()) != setting:
        raise OptiGPUError(differs)
    return folder / f"{name}.npy"


def open_reference(folder: Path, setting: Setting) -> Reference:
    """Raises OptiGPUError when there is none, when it was made for another setting, or when its passages were
    changed."""
    if not (folder / _MANIFEST).is_file():
        raise missing_reference(folder)
    manifest = Manifest.model_validate_json((folder / _MANIFEST).read_bytes())
    expected, found = manifest.setting.model_dump(), setting.model_dump()
    different = [name for name in expected if expected[name] != found[name]]
    if different == ["dataset_sha256"]:
        raise OptiGPUError(
            f"The dataset {setting.text} changed while the job ran (its SHA-256 differs); run the job again."
        )
    if different:
        name = different[0]
        raise OptiGPUError(
            f"The fp32 reference was made for {name} {expected[name]} but this variant has {found[name]}; submit it "
            "as a separate job."
        )
    with np.load(folder / _PASSAGES, allow_pickle=False) as arrays:
        passages = unpack(arrays)
    if digest_of(passages) != manifest.passages_sha256:
        raise OptiGPUError(
            "The tokens of the reference on disk do not match its manifest; run the job again."
        )
    likelihoods = np.load(folder / _LIKELIHOODS, allow_pickle=False)
    return Reference(manifest, passages, likelihoods, folder / _LOGITS)
