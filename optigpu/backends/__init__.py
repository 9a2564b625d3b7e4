"""The backends, one folder each: they execute a variant inside the measuring process.

To add one, write its folder and list it here.
"""

from optigpu.backends.base import Backend
from optigpu.backends.llama_cpp import LlamaCppBackend
from optigpu.backends.torch import TorchBackend

_ALL: tuple[Backend, ...] = (TorchBackend(), LlamaCppBackend())

BACKENDS: dict[str, Backend] = {backend.name: backend for backend in _ALL}
"""Every backend by its name; the job's field `backend`, the measuring process, the workers and the documents read
it."""
