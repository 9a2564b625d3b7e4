"""Behaves by what its stack holds: refuses, breaks, runs out of memory, gives an invalid output, never settles."""

from tests.engine.children import talk

stack = [technique["name"] for technique in talk.hear()["variant"]["stack"]]
if stack == ["bf16"]:
    talk.say("refused", reason="no bf16 here\x00")
elif stack == ["fp16"]:
    talk.say("broken", fault="error", reason="a layer is missing", trace="Traceback ...")
elif stack == ["no_kv_cache"]:
    talk.say("broken", fault="out_of_memory", reason="8 GB were asked for")
elif stack == ["eager_attention"]:
    talk.obey(tokens_per_s=1000.0, problem="3 of 8 tokens")
elif stack == ["static_kv_cache"]:
    talk.obey(tokens_per_s=20.0, steady=False)
talk.obey(tokens_per_s=10.0)
