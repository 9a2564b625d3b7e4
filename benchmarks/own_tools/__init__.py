"""Each engine's own way to time the model that a variant runs, in a process of its own that answers as peers do.

It loads the file that the variant's process has written, with as many threads, and decodes as many tokens after a
prompt as long. Nothing of OptiGPU is in what it times.
"""

import json
from dataclasses import dataclass

from benchmarks.stacks import Case, Stack


@dataclass(frozen=True)
class Tool:
    """The module of this folder that times `stack`; `more` are further arguments of its command line."""

    name: str
    module: str
    stack: Stack
    more: tuple[str, ...] = ()

    def arguments(self, case: Case) -> list[str]:
        """As `own_tools.asked` reads them."""
        return [
            *("--model", f"preset:{case.preset}", "--backend", self.stack.backend),
            *("--stack", json.dumps(list(self.stack.techniques))),
            *("--prompt-tokens", str(case.prompt_tokens), "--new-tokens", str(case.new_tokens)),
            *self.more,
        ]
