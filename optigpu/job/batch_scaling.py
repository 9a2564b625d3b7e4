"""The plan `batch_scaling`: how long it will take."""

import math
from collections.abc import Sequence

from optigpu.documents.events import Estimated
from optigpu.job.estimate import START_S, Guess, Plan, spoken
from optigpu.job.spec import JobSpec, Variant

ATTEMPTS = "attempts"
"""All that a variant's process does: it loads the model, and tries batches."""
ATTEMPT_S = 2.0


def guessed(spec: JobSpec, variants: Sequence[Variant]) -> tuple[Plan, Estimated]:
    """One process for each variant, which doubles the batch until memory runs out, and bisects."""
    attempts = 2 * math.ceil(math.log2(spec.limits.max_batch)) + 1
    guess = Guess({ATTEMPTS: START_S + attempts * ATTEMPT_S})
    plan = Plan(spec=spec, guesses={variant.index: guess for variant in variants}, replicates=1)
    seconds, limit = plan.beside_sampling_s, spec.limits.timeout_s
    return plan, Estimated(
        seconds=seconds,
        limit_s=limit,
        replicates=1,
        sentence=f"{len(variants)} x {attempts} batches at most, about {spoken(seconds)} (an estimate); the limit is "
        f"{spoken(limit)}.",
    )
