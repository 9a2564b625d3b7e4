"""The backends, one folder each: the engines that execute a variant inside the measuring process.

To add one: write its folder and name its class in `_ALL`. What a backend is, `base.py` says; what its runtime offers,
`runtime.py` and `operators.py`.
"""

from optigpu.backends.base import Backend
from optigpu.backends.coreml import CoreMlBackend
from optigpu.backends.endpoint import EndpointBackend
from optigpu.backends.ik_llama_cpp import IkLlamaCppBackend
from optigpu.backends.litert import LiteRtBackend
from optigpu.backends.llama_cpp import LlamaCppBackend
from optigpu.backends.onnxruntime import OnnxRuntimeBackend
from optigpu.backends.openvino import OpenVinoBackend
from optigpu.backends.tensorflow import TensorFlowBackend
from optigpu.backends.tensorrt_llm import TensorRtLlmBackend
from optigpu.backends.torch import TorchBackend
from optigpu.backends.vllm import VllmBackend

_ALL: tuple[Backend, ...] = (
    TorchBackend(), LlamaCppBackend(), IkLlamaCppBackend(), LiteRtBackend(), OnnxRuntimeBackend(), TensorFlowBackend(),
    VllmBackend(), TensorRtLlmBackend(), CoreMlBackend(), EndpointBackend(), OpenVinoBackend(),
)  # fmt: skip
BACKENDS: dict[str, Backend] = {backend.name: backend for backend in _ALL}
"""Every backend by its name, for the job's field `backend`, the measuring process, the workers and the documents."""
