"""After how many steps compiling has saved as much time as it took."""

from optigpu.documents.result import Gain, Outcome, Payback

TIMES = ("step_s", "latency_s")
"""The metrics that are the time of a whole request, the first that a workload has."""


def time_of(outcome: Outcome) -> str | None:
    """The metric that is the time of a whole request; None for a workload without one."""
    return next((name for name in TIMES if name in outcome.samples), None)


def compile_seconds(outcome: Outcome) -> float | None:
    """The time of the process that compiled the longest: the others read from disk what it had compiled.

    None where nothing was compiled.
    """
    found = outcome.samples.get("compile_s")
    return max(max(each) for each in found) if found else None


def payback_of(compile_s: float, request_s: float, gain: Gain) -> Payback:
    """What compiling for `compile_s` means for requests of `request_s` whose speed it multiplied by the gain's ratio.

    A request saves request_s * (ratio - 1).
    """
    if gain.ratio <= 1:
        why = "A step is no faster than without compiling, so that it is never paid back."
        return Payback(steps=None, compared_with=gain.compared_with, reason=why)
    low, high = gain.ci or (0.0, 0.0)
    is_sure = low > 1
    why = "The ratio of the two has no interval above 1, so that it may never be paid back."
    return Payback(
        steps=_steps(compile_s, request_s, gain.ratio),
        ci=(_steps(compile_s, request_s, high), _steps(compile_s, request_s, low)) if is_sure else None,
        compared_with=gain.compared_with,
        reason=None if is_sure else why,
    )


def _steps(compile_s: float, request_s: float, ratio: float) -> float:
    return compile_s / (request_s * (ratio - 1))
