"""As well_behaved, until one moment of one replicate of each variant with techniques: there it says nothing more.

Its arguments are the replicate and the kind of the message that it does not answer.
"""

import sys

from tests.engine.children import talk

replicate, kind = int(sys.argv[1]), sys.argv[2]
assignment = talk.hear()
pauses = assignment["replicate"] == replicate and bool(assignment["variant"]["stack"])


def pause_at(command: str) -> None:
    if pauses and command == kind:
        talk.say("progress", doing="hanging")
        talk.hear()


pause_at("assignment")
talk.obey(tokens_per_s=10.0, before=pause_at)
