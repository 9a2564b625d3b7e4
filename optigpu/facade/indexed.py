"""Data whose fields can also be read by name in brackets, as the founding documents read dictionaries."""

from optigpu.documents.names import closest, did_you_mean


class Indexed:
    """The base of frozen dataclasses: `row["step_ms"]` is `row.step_ms`."""

    def __getitem__(self, name: str) -> object:
        """Raises KeyError, which lists the fields, for a name that is none of them."""
        values: dict[str, object] = vars(self)
        if name not in values:
            meant = did_you_mean(closest(name, values))
            raise KeyError(f"There is no field {name!r}.{meant} The fields are {', '.join(values)}.")
        return values[name]
