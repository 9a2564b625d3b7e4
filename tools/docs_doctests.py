"""A griffe extension: the examples of a docstring become blocks of code, which Markdown would read as quotations."""

import re

from griffe import Extension, Object

EXAMPLE = re.compile(r"(?:^>>> .*\n?(?:^(?!>>> ).+\n?)*)+", re.MULTILINE)
"""Lines from the first `>>> ` up to the next empty one."""


class Doctests(Extension):
    """Fences every example."""

    def on_object(self, *, obj: Object, **_: object) -> None:
        """Called by griffe for each object that it has read."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """The text with each example as a block of Python."""
    return EXAMPLE.sub(lambda found: f"```python\n{found[0].rstrip()}\n```\n", text)
