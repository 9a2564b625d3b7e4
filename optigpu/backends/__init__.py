"""The backends, one folder each: the engines that execute a variant inside the measuring process.

To add one: write its folder and name its class in `_ALL`. What a backend is, `base.py` says; what its runtime offers,
`runtime.py` and `operators.py`.
"""

from optigpu.backends.base import Backend
from optigpu.backends.litert import LiteRtBackend
from optigpu.backends.llama_cpp import LlamaCppBackend
from optigpu.backends.torch import TorchBackend

_ALL: tuple[Backend, ...] = (TorchBackend(), LlamaCppBackend(), LiteRtBackend())

BACKENDS: dict[str, Backend] = {backend.name: backend for backend in _ALL}
"""Every backend by its name; the job's field `backend`, the measuring process, the workers and the documents read
it."""
