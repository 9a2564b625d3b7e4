"""One whole forward pass over random inputs: the request of each workload that decodes nothing."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from optigpu.backends.runtime import Ids, Images, PassRuntime
from optigpu.workloads.base import Check
from optigpu.workloads.requests.decoding import Untouched


class PassRequest:
    """Repeated passes over the same inputs."""

    def __init__(
        self,
        runtime: PassRuntime,
        draw: Callable[[np.random.Generator], Ids | Images],
        expected: tuple[int, int],
        metrics: Callable[[float], Mapping[str, float]],
        seed: int | None = None,
        inputs: Ids | Images | None = None,
        earlier: Untouched | None = None,
    ) -> None:
        """`draw` makes inputs from `seed`, or from the runtime's own; `inputs` take their place. `expected` is the
        logits' shape, `metrics` follow from the seconds."""
        self._runtime, self._draw, self._expected, self._metrics = runtime, draw, expected, metrics
        source = np.random.default_rng(runtime.seed if seed is None else seed)
        self._inputs = draw(source) if inputs is None else inputs
        self._untouched = Untouched(self._inputs, earlier)

    def run(self) -> Mapping[str, float]:
        """One timed pass."""
        return self._metrics(self._runtime.forward(self._inputs).seconds)

    def check(self) -> Check:
        """Looks at the shape of the logits, for NaN and infinity, and at what was chosen."""
        done = self._runtime.forward(self._inputs)
        if self._untouched.problem:
            return Check(done.seconds, self._untouched.problem)
        if done.logits.shape != self._expected:
            return Check(
                done.seconds,
                f"The pass gave logits of shape {done.logits.shape} instead of {self._expected}.",
            )
        wrong = int((~np.isfinite(done.logits)).sum())
        if wrong:
            return Check(done.seconds, f"{wrong} of {done.logits.size} logits are NaN or infinite.")
        if not np.array_equal(done.chosen, done.logits.argmax(axis=-1)):
            return Check(
                done.seconds, "The pass chose another token or class than the one with the largest logit."
            )
        return Check(done.seconds)

    def observe(self) -> None:
        """Records which kernels run."""
        self._runtime.observe(self._inputs)

    def described(self) -> Mapping[str, Sequence[float]]:
        """A pass has no parts."""
        return {}

    def fresh(self, seed: int) -> "PassRequest":
        """The same pass over other inputs."""
        earlier = self._untouched
        return PassRequest(self._runtime, self._draw, self._expected, self._metrics, seed, earlier=earlier)
