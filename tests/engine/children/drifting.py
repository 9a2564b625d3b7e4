"""As well_behaved, on a machine that is twice as fast in the second replicate as in the first."""

from tests.engine.children import talk

assignment = talk.hear()
techniques = len(assignment["variant"]["stack"])
talk.obey(tokens_per_s=10.0 * (1 + techniques) * (1 + assignment["replicate"]))
