"""CTranslate2's `Generator.generate_batch` as its documentation shows it: a request less one of a single token."""

import time
from collections.abc import Sequence

from benchmarks.own_tools.asked import Rate, found, parser, serve
from optigpu.backends.base import Order


def generated(order: Order) -> Rate:
    """Without a callback for each token."""
    import ctranslate2

    from optigpu.backends.ctranslate2.runtime import CONVERTER
    from optigpu.techniques.base import engine_options

    kind = engine_options(order.stack).weights
    folder = found(CONVERTER.kept(order, kind))
    generator = ctranslate2.Generator(
        str(folder), device="cpu", compute_type=kind, inter_threads=1, intra_threads=order.threads
    )

    def seconds(names: list[str], count: int) -> float:
        started = time.perf_counter()
        generator.generate_batch([names], max_length=count, min_length=count, include_prompt_in_result=False)
        return time.perf_counter() - started

    def rate(prompt: Sequence[int], count: int) -> float:
        names = [str(token) for token in prompt]
        return (count - 1) / (seconds(names, count) - seconds(names, 1))

    return rate


if __name__ == "__main__":
    serve(generated, parser(__doc__).parse_args())
