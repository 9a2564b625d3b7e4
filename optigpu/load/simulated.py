"""An engine whose steps take a known time, on a clock that they move: for checks against queueing theory."""

from collections.abc import Sequence

from optigpu.load.clock import VirtualClock


class SimulatedSlots:
    """Slots that decode nothing. A prefill takes `prefill_s`, a step of any number of sequences `step_s`.

    `stalls` are moments at which the server stands still: the first call that begins after one takes that much longer.
    """

    block_tokens = 1

    def __init__(
        self,
        clock: VirtualClock,
        count: int,
        prefill_s: float,
        step_s: float,
        stalls: Sequence[tuple[float, float]] = (),
    ) -> None:
        self.count, self.length = count, 2**20
        self._clock, self._prefill_s, self._step_s = clock, prefill_s, step_s
        self._stalls = sorted(stalls, reverse=True)

    def join(self, slot: int, prompt: Sequence[int]) -> int:
        """Takes its time."""
        self._work(self._prefill_s)
        return 0

    def step(self, slots: Sequence[int]) -> Sequence[int]:
        """Takes its time once for all."""
        self._work(self._step_s)
        return [0] * len(slots)

    def leave(self, slot: int) -> None:
        """Takes no time."""

    def close(self) -> None:
        """There is nothing to give back."""

    def _work(self, seconds: float) -> None:
        while self._stalls and self._stalls[-1][0] <= self._clock.now():
            self._clock.pass_by(self._stalls.pop()[1])
        self._clock.pass_by(seconds)
