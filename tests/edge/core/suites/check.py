"""Assertions that say what differs, on interpreters without pytest."""


def equal(found: object, wanted: object) -> None:
    if found != wanted:
        raise AssertionError(f"{found!r} is not {wanted!r}")


def raises(kind: type, function, *arguments) -> str:
    """The message of the error."""
    try:
        function(*arguments)
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__} was raised")
