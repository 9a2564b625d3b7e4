"""ONNX Runtime's Python API as its documentation shows it: OrtValues that an IOBinding has as inputs and outputs."""

import time
from collections.abc import Sequence

import numpy as np

from benchmarks.own_tools.asked import Rate, found, parser, serve
from optigpu.backends.base import Order
from optigpu.documents.shapes import Footprint


def looped(order: Order) -> Rate:
    """Keys and values of a block are one OrtValue, which is the past and the present."""
    from onnxruntime import InferenceSession, OrtValue, SessionOptions

    from optigpu.backends.onnxruntime.contents import MODEL, Contents
    from optigpu.backends.onnxruntime.formats import format_of
    from optigpu.backends.onnxruntime.prepare import CONVERTER

    folder = found(CONVERTER.kept(order, format_of(order.stack).name))
    footprint = Contents.read(folder).footprint
    assert isinstance(footprint, Footprint), "a decoder was converted"
    options = SessionOptions()
    options.intra_op_num_threads = order.threads
    session = InferenceSession(str(folder / MODEL), options, providers=["CPUExecutionProvider"])
    facts, inputs = footprint.facts, {each.name for each in session.get_inputs()}

    def rate(prompt: Sequence[int], count: int) -> float:
        binding = session.io_binding()
        shape = (1, facts.kv_heads, len(prompt) + count, facts.head_size)
        for name in inputs:
            if name.startswith("past_"):
                kept = OrtValue.ortvalue_from_numpy(np.zeros(shape, np.float32))
                binding.bind_ortvalue_input(name, kept)
                binding.bind_ortvalue_output(name.replace("past_", "present_"), kept)
        logits = OrtValue.ortvalue_from_numpy(np.zeros((1, facts.vocabulary), np.float32))
        binding.bind_ortvalue_output("logits", logits)
        moments, tokens, used = [], list(prompt), 0
        for _ in range(count):
            total = used + len(tokens)
            binding.bind_cpu_input("input_ids", np.array([tokens], np.int64))
            binding.bind_cpu_input("seqlens_k", np.array([total - 1], np.int32))
            binding.bind_cpu_input("total_length", np.array([total], np.int32))
            if "positions" in inputs:
                binding.bind_cpu_input("positions", np.arange(used, total))
            session.run_with_iobinding(binding)
            tokens, used = [int(logits.numpy().argmax())], total
            moments.append(time.perf_counter())
        return (count - 1) / (moments[-1] - moments[0])

    return rate


if __name__ == "__main__":
    serve(looped, parser(__doc__).parse_args())
