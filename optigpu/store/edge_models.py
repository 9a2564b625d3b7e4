"""The models that edge devices report on, by their files."""

from sqlalchemy import select
from sqlalchemy.orm import Session

from optigpu.documents.devices import EdgeModelView
from optigpu.documents.manifest import ModelManifest
from optigpu.store.database import moment
from optigpu.store.statements import insert_into
from optigpu.store.tables import EdgeModel
from optigpu.vocabulary import ConflictError, Document, Frozen, canonical_json


class AddedModel(Frozen):
    """A model that was posted. `created` is False when the same manifest had been posted before."""

    model: EdgeModelView
    created: bool


def add(session: Session, manifest: ModelManifest) -> AddedModel:
    """Enters a model. Raises ConflictError if another manifest is known for the same file."""
    document = manifest.model_dump(mode="json", by_alias=True)
    row = {"sha256": manifest.sha256, "rankable": manifest.rankable, "document": document}
    insert = insert_into(session, EdgeModel).values(row | {"added_at": moment(session)})
    insert = insert.on_conflict_do_nothing(index_elements=["sha256"])
    created = session.scalars(insert.returning(EdgeModel.sha256)).one_or_none() is not None
    stored = session.get_one(EdgeModel, manifest.sha256)
    if canonical_json(stored.document) != canonical_json(document):
        raise ConflictError(
            f"Another manifest of the model {manifest.sha256} is known; a manifest that reports were judged by stays."
        )
    return AddedModel(model=stored.as_view(EdgeModelView, manifest=stored.document), created=created)


def manifest_of(session: Session, sha256: str) -> ModelManifest | None:
    """The manifest of a model; None if it is not known. It is read once a session: a message has many reports."""
    known: dict[str, ModelManifest] = session.info.setdefault("edge_manifests", {})
    if sha256 not in known:
        row = session.get(EdgeModel, sha256)
        if row is None:
            return None
        known[sha256] = ModelManifest.model_validate(row.document)
    return known[sha256]


def list_(session: Session) -> list[EdgeModelView]:
    """Every model, newest first."""
    rows = session.scalars(select(EdgeModel).order_by(EdgeModel.added_at.desc(), EdgeModel.sha256))
    return [row.as_view(EdgeModelView, manifest=row.document) for row in rows]


def document_of(session: Session, sha256: str) -> Document | None:
    """A model's manifest as it was stored; None if it is not known."""
    row = session.get(EdgeModel, sha256)
    return row.document if row else None
