"""Times attention as it should: 1 GFLOP/s for the standard implementation, and 2 for the fused one."""

from tests.engine.children import talk

(implementation,) = talk.hear()["variant"]["workload"]["implementations"]
tflops = 0.002 if implementation == "fused" else 0.001
talk.ready()
while True:
    command = talk.hear()
    count = max(command.get("min_requests", 0), command.get("requests", 0), 20)
    rates = [tflops * (1 + 0.001 * (number % 5 - 2)) for number in range(count)]
    samples = {"tflops": rates, "latency_s": [1 / rate for rate in rates]}
    talk.say("round" if command["kind"] == "run_round" else "audited", samples=samples)
