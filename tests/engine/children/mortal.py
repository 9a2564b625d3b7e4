"""As well_behaved; each variant with techniques dies at the command whose number, from 1, is its argument."""

import os
import sys

from tests.engine.children import talk

LAST = int(sys.argv[1])
assignment = talk.hear()
is_mortal = bool(assignment["variant"]["stack"])
heard: list[str] = []


def count(command: str) -> None:
    heard.append(command)
    if is_mortal and len(heard) == LAST:
        os._exit(3)


talk.obey(tokens_per_s=10.0, before=count)
