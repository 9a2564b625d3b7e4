"""Data whose fields can also be read by name in brackets, as the founding documents read dictionaries."""

from dataclasses import fields, is_dataclass

from optigpu.documents.names import closest, did_you_mean


class Indexed:
    """The base of frozen dataclasses: `row["step_ms"]` is `row.step_ms`."""

    def __getitem__(self, name: str) -> object:
        """Raises KeyError, which lists the fields, for a name that is none of them."""
        known = [each.name for each in fields(self)] if is_dataclass(self) else []
        if name not in known:
            meant = did_you_mean(closest(name, known))
            raise KeyError(f"There is no field {name!r}.{meant} The fields are {', '.join(known)}.")
        found: object = getattr(self, name)
        return found
