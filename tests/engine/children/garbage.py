"""Answers with what is no message, named by its argument."""

import sys

from tests.engine.children import talk

talk.hear()
print("the model\x00 said: \x1b[31mhelp", file=sys.stderr)
answers = {
    "text": b"Segmentation fault\n",
    "binary": b"\x00\xff\xfe{}\n",
    "unknown": b'{"kind": "surprise"}\n',
    "nan": b'{"kind": "round", "samples": {"tokens_per_s": [NaN]}}\n',
    "early": b'{"kind": "round", "samples": {}}\n',
    "endless": b"x" * 4096,
}
if sys.argv[1] in answers:
    talk.write(answers[sys.argv[1]])
else:
    talk.ready()
    talk.hear()
    rounds = {
        "missing": {"tokens_per_s": [1.0]},
        "uneven": talk.samples(1.0, 3) | {"ttft_s": [1.0]},
        "empty": talk.samples(1.0, 0),
        "zero": talk.samples(1.0, 3) | {"tokens_per_s": [1.0, 0.0, 1.0]},
    }
    talk.say("round", samples=rounds[sys.argv[1]])
talk.hear()
