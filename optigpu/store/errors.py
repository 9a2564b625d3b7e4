"""What the results database refuses, beyond the errors of the vocabulary."""

from optigpu.vocabulary import StoreError


class CursorError(StoreError):
    """A page was asked for with a cursor that this service did not give out."""


class StoreUnavailableError(StoreError):
    """The database cannot be reached, or its tables are not those of this version."""
