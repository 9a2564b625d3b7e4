"""OpenVINO's Python API as its documentation shows it for models with a state: a request is started and waited for."""

import time
from collections.abc import Sequence

import numpy as np

from benchmarks.own_tools.asked import Rate, found, parser, serve
from optigpu.backends.base import Order


def looped(order: Order) -> Rate:
    """The model is compiled with the properties of the variant."""
    from optigpu.backends.openvino.contents import GRAPH
    from optigpu.backends.openvino.kept import CONVERTER
    from optigpu.backends.openvino.library import ov
    from optigpu.backends.openvino.settings import form_of, properties_of
    from optigpu.techniques.base import engine_options

    options = engine_options(order.stack)
    folder = found(CONVERTER.kept(order, form_of(options).name))
    compiled = ov.Core().compile_model(folder / GRAPH, "CPU", properties_of(options, order.threads))
    request = compiled.create_infer_request()

    def rate(prompt: Sequence[int], count: int) -> float:
        request.reset_state()
        request.set_tensor("beam_idx", ov.Tensor(np.zeros(1, np.int32)))
        moments, tokens, used = [], list(prompt), 0
        for _ in range(count):
            total = used + len(tokens)
            request.set_tensor("input_ids", ov.Tensor(np.array([tokens], np.int64)))
            request.set_tensor("attention_mask", ov.Tensor(np.ones((1, total), np.int64)))
            request.set_tensor("position_ids", ov.Tensor(np.arange(used, total)[None]))
            request.start_async()
            request.wait()
            tokens, used = [int(request.get_tensor("logits").data[0, -1].argmax())], total
            moments.append(time.perf_counter())
        return (count - 1) / (moments[-1] - moments[0])

    return rate


if __name__ == "__main__":
    serve(looped, parser(__doc__).parse_args())
