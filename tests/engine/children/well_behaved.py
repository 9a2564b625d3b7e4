"""Measures as it should: 10 tokens/s for the plain model, 10 more for each technique; says where it runs."""

import os

from tests.engine.children import talk

assignment = talk.hear()
techniques = len(assignment["variant"]["stack"])
talk.say("progress", doing="loading")
print("what a model prints")
talk.obey(
    tokens_per_s=10.0 * (1 + techniques) + 0.01 * assignment["replicate"],
    compile_s=None if techniques == 0 else 1.5,
    facts={"recorded": {"pid": os.getpid(), "variables": dict(os.environ)}},
)
