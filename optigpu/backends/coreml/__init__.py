"""The coreml backend: models as Core ML packages, on a Mac.

It has never run on a machine of this project: `optigpu selftest` checks it where it is installed. Only `start` and
`prepare` import it.
"""

import platform

from optigpu.backends.engine import EngineBackend
from optigpu.documents.result import Environment


class CoreMlBackend(EngineBackend):
    """Runs passes over whole sequences: the package has no cache, and says so in the facts."""

    name = "coreml"
    summary = "Core ML packages without a cache, on a Mac"
    packages = ("coremltools",)
    install = 'pip install -e ".[coreml]"'
    workloads = ("generate", "quality")

    def missing(self, environment: Environment) -> str | None:
        """A Mac, or the package."""
        if platform.system() != "Darwin":
            return f"coreml runs on macOS alone, and this is {platform.system()}; ask a worker on a Mac."
        return super().missing(environment)
