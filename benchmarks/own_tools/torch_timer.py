"""torch.utils.benchmark.Timer around transformers' `generate`: a whole request less one of a single token."""

from collections.abc import Sequence

from benchmarks.own_tools.asked import Rate, parser, serve
from optigpu.backends.base import Order
from optigpu.vocabulary import UnsupportedError


def timed(order: Order) -> Rate:
    """Raises UnsupportedError for a stack: only the plain model is another's."""
    import torch
    from torch.utils.benchmark import Timer

    from optigpu.models.loading.load import load_model
    from optigpu.models.reference import parse_reference

    if order.stack:
        raise UnsupportedError("Techniques are OptiGPU's own; torch's timer measures the plain model.")
    model = load_model(parse_reference(str(order.model)), device="cpu", dtype="float32", seed=order.seed)

    def seconds(prompt: Sequence[int], count: int) -> float:
        timer = Timer(
            "model.generate(prompt, max_new_tokens=count, do_sample=False)",
            globals={"model": model, "prompt": torch.tensor([list(prompt)]), "count": count},
            num_threads=order.threads,
        )
        return float(timer.timeit(1).median)

    def rate(prompt: Sequence[int], count: int) -> float:
        return (count - 1) / (seconds(prompt, count) - seconds(prompt, 1))

    return rate


if __name__ == "__main__":
    serve(timed, parser(__doc__).parse_args())
