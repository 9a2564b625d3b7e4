"""Errors of the results database, besides those of the vocabulary."""

from optigpu.vocabulary import NotFoundError, StoreError


class CursorError(StoreError):
    """The cursor of a page was not issued by this service."""


class WithdrawnError(NotFoundError):
    """The result or the job was withdrawn; the text says when and why."""


class KeyRefusedError(StoreError):
    """The key of a device was replaced or revoked."""


class StoreUnavailableError(StoreError):
    """The database cannot be reached, or its tables are not those of this version."""
