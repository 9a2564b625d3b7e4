"""Reports of runs, each kept as `runs/ID.json` in the data folder."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

from pydantic import ValidationError

from optigpu.documents.events import Event, Span, VariantFinished
from optigpu.documents.fields import is_report, read_json
from optigpu.documents.result import Attribution
from optigpu.documents.versions import RUN_FORMAT, KeptOutcome, RunDocument
from optigpu.measure import Report
from optigpu.paths import data_dir, draft_of, saying
from optigpu.report.leaderboard import models_text
from optigpu.vocabulary import Document, SpecError, new_id, utc_now

LAST = "last"
FEWEST_CHARACTERS = 4
"""Of an id's end, by which a run may be named if no other ends so. The beginnings are the time, and often alike."""


@dataclass(frozen=True)
class KeptRun:
    """A report as it lies in a file."""

    path: Path
    document: Document

    @property
    def id(self) -> str:
        return str(self.document["id"])

    @property
    def created_at(self) -> str:
        return str(self.document["created_at"])

    @property
    def spec(self) -> Document:
        spec: Document = self.document["spec"]
        return spec

    @property
    def results(self) -> list[Document]:
        results: list[Document] = self.document["results"]
        return results

    @property
    def attribution(self) -> Attribution:
        return Attribution.model_validate(self.document["attribution"], extra="ignore")

    @property
    def summary(self) -> Document:
        """What a list of runs shows."""
        best = next((row for row in self.attribution.rows if row.index == self.attribution.best), None)
        return {
            "id": self.id,
            "created_at": self.created_at,
            "name": self.spec.get("name"),
            "tags": self.spec.get("tags", []),
            "workload": self.spec["workload"],
            "model": models_text(self.spec),
            "plan": self.spec["plan"],
            "results": len(self.results),
            "best": best.label if best else None,
            "stopped": self.stopped,
        }

    @property
    def samples(self) -> dict[str, Document]:
        """The raw samples of each result, by its id; a file that was printed as JSON has none."""
        ids = {result["variant"]["index"]: str(result["id"]) for result in self.results}
        told = [each for each in self.document.get("outcomes", []) if each.get("samples")]
        return {ids[each["index"]]: each["samples"] for each in told if each["index"] in ids}

    @property
    def artifacts(self) -> dict[str, dict[str, bytes]]:
        """The files that meters left, by the result's id and their name."""
        found = {
            str(result["id"]): sorted((files_of(self.id) / str(result["variant"]["index"])).glob("*"))
            for result in self.results
        }
        return {result: {path.name: path.read_bytes() for path in paths} for result, paths in found.items()}

    @property
    def timeline(self) -> tuple[Span, ...]:
        """Where its time went; empty where the run was kept by an earlier version, or printed."""
        return tuple(Span.model_validate(each) for each in self.document.get("timeline", ()))

    @property
    def stopped(self) -> str | None:
        """Why the run ended before everything was measured; None if it did not."""
        stopped: str | None = self.document.get("stopped")
        return stopped


def folder() -> Path:
    """Where runs are kept; it may not exist yet."""
    return data_dir() / "runs"


class Keeper:
    """Keeps a run that is to come: the files that its meters leave as they come, its report at the end."""

    def __init__(self) -> None:
        """Raises OptiGPUError if nothing can be written there: better now than when everything was measured."""
        self.id = new_id()
        with _writing(folder()):
            folder().mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=folder()):
                pass

    def saw(self, event: Event) -> None:
        """Copies a variant's artifacts, which exist only while its event is handled."""
        if not isinstance(event, VariantFinished):
            return
        for name, path in event.outcome.artifacts.items():
            copy = files_of(self.id) / str(event.outcome.index) / name
            with _writing(copy.parent):
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)

    def keep(self, report: Report) -> KeptRun:
        """Writes the report with its raw samples, whole or not at all. Raises OptiGPUError if that is not possible."""
        outcomes = (KeptOutcome.model_validate(each, from_attributes=True) for each in report.outcomes)
        run = RunDocument(
            id=self.id,
            created_at=utc_now(),
            spec=report.spec.model_dump(mode="json"),
            results=report.results,
            attribution=report.attribution,
            outcomes=tuple(outcomes),
            stopped=report.stopped,
            timeline=report.timeline,
        )
        document = run.model_dump(mode="json")
        path = folder() / f"{self.id}.json"
        with _writing(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            with draft_of(path) as draft:
                draft.write_text(json.dumps(document), encoding="utf-8")
        return KeptRun(path, document)


def files_of(run_id: str) -> Path:
    """Where the artifacts of a run are kept, in a folder for each variant's index; it may not exist."""
    return folder() / f"{run_id}.files"


def _writing(place: Path) -> AbstractContextManager[None]:
    advice = "make room or give the right to write there, or name another folder in OPTIGPU_DATA_DIR"
    return saying(f"Runs cannot be kept in {place}", advice)


def kept_runs() -> Iterator[KeptRun]:
    """Every kept run, the newest first. A file that is no run is passed over."""
    for path in sorted(folder().glob("*.json"), reverse=True):  # ids begin with the time
        try:
            yield read(path)
        except SpecError:
            continue


def find(name: str) -> KeptRun:
    """The run of that id, or of one that ends so, or in that file; "last" is the newest. Raises SpecError where there
    is none, or several."""
    path = Path(name)
    if path.suffix == ".json" or (os.path.exists(path) and not os.path.isdir(path)):
        return read(path)
    if name == LAST:
        found = sorted(folder().glob("*.json"))[-1:]
    else:
        may_be_id = len(name) >= FEWEST_CHARACTERS and set(name) <= set("0123456789abcdef-")
        found = sorted(folder().glob(f"*{name}.json")) if may_be_id else []
    if len(found) == 1:
        return read(found[0])
    if found:
        raise SpecError(
            f"{len(found)} runs end with {name!r}; give more of the id (`optigpu runs` lists them)."
        )
    raise SpecError(f"No run here is called {name!r}; `optigpu runs` lists those that are kept.")


def read(path: Path) -> KeptRun:
    """The run in a file. Raises SpecError if it cannot be read, is no run, or was written by a later version."""
    document = read_json(path)
    if not is_report(document) or not _is_attribution(document.get("attribution")):
        raise SpecError(
            f"{path} holds no run; give a file of {folder()}, or one that `optigpu run --format json` wrote."
        )
    if document.get("format", RUN_FORMAT) > RUN_FORMAT:
        raise SpecError(
            f"{path} was written by a later version of OptiGPU (format {document['format']}, this one reads up to "
            f"{RUN_FORMAT}); update OptiGPU."
        )
    rows: list[Document] = document["attribution"]["rows"]
    usual = {  # what a report that was printed as JSON lacks; it tells no raw samples
        "format": RUN_FORMAT,
        "id": path.stem,
        "created_at": max((result.get("created_at", "") for result in document["results"]), default=""),
        "outcomes": [{name: row.get(name) for name in ("index", "status", "reason")} for row in rows],
    }
    return KeptRun(path, {**usual, **document})


def _is_attribution(document: object) -> bool:
    try:
        Attribution.model_validate(document, extra="ignore")
    except ValidationError:
        return False
    return True
