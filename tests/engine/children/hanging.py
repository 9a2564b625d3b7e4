"""Says nothing more after the assignment of a variant with techniques; ends when its stdin closes."""

from tests.engine.children import talk

if talk.hear()["variant"]["stack"]:
    talk.say("progress", doing="hanging")
    talk.hear()
talk.obey(tokens_per_s=10.0)
