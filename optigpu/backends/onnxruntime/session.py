"""A written graph in ONNX Runtime's CPU provider."""

from pathlib import Path

import onnxruntime
from onnxruntime import GraphOptimizationLevel, InferenceSession, SessionOptions

from optigpu.backends.onnxruntime.contents import MODEL

PROVIDER = "CPUExecutionProvider"
LEVELS = {
    "disabled": GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": GraphOptimizationLevel.ORT_ENABLE_ALL,
}
"""How far a session rewrites its graph."""
_ERRORS_ONLY = 3


def opened(folder: Path, threads: int, level: str) -> InferenceSession:
    """The graph of a folder. Operators run one after another, each on all threads, which spin as by default.

    Raises RuntimeError for a file that is no graph.
    """
    options = SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.graph_optimization_level = LEVELS[level]
    options.log_severity_level = _ERRORS_ONLY
    try:
        return InferenceSession(str(folder / MODEL), options, providers=[PROVIDER])
    except Exception as error:  # ONNX Runtime's have no base of their own
        raise RuntimeError(str(error)) from error


def build_facts() -> dict[str, object]:
    """How the library was built, for a result's notes."""
    return {
        "onnxruntime_build": onnxruntime.get_build_info(),
        "onnxruntime_providers": [PROVIDER],
        "onnxruntime_spinning": "the engine's default: threads spin while they wait",
    }
