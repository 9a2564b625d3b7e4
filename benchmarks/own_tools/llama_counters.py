"""llama-cpp-python's `Llama.generate`, by llama.cpp's own counters of decode steps (`llama_perf_context`)."""

from collections.abc import Sequence
from itertools import islice

from benchmarks.own_tools.asked import Rate, parser, serve, silent
from optigpu.backends.base import Order


def counted(order: Order, length: int) -> Rate:
    """For sequences of `length` tokens.

    Flash attention is what llama.cpp chooses by itself on a CPU, and what its Python class leaves out by itself.
    """
    import llama_cpp

    from optigpu.backends.llama_cpp.engine import LLAMA_CPP
    from optigpu.backends.llama_cpp.source import source_of

    path = source_of(order, LLAMA_CPP, LLAMA_CPP.open(), silent).path
    model = llama_cpp.Llama(
        str(path),
        n_ctx=length,
        n_threads=order.threads,
        n_threads_batch=order.threads,
        flash_attn=True,
        no_perf=False,
        verbose=False,
    )

    def rate(prompt: Sequence[int], count: int) -> float:
        model.reset()
        llama_cpp.llama_perf_context_reset(model.ctx)
        for _ in islice(model.generate(list(prompt), temp=0.0, repeat_penalty=1.0), count):
            pass
        found = llama_cpp.llama_perf_context(model.ctx)
        return float(1e3 * found.n_eval / found.t_eval_ms)

    return rate


def main() -> None:
    options = parser(__doc__).parse_args()
    serve(lambda order: counted(order, options.prompt_tokens + options.new_tokens), options)


if __name__ == "__main__":
    main()
