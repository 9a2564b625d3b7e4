"""`python -m esp32_agent.port.simulated`: a part of a simulated fleet in this process, a thread for each device.

`optigpu device-sim` starts it. It reads one line of JSON, the plan, from stdin, and measures until the plan's time is
over or stdin ends; then it sends what is left, for at most `drain_s`. It writes lines of JSON: each second the
progress, at the end an account of each device. `--model` prints what the simulated model is instead.
"""

import json
import sys
import threading
import time

from esp32_agent.port.simulated.device import Device, Plan, Times
from esp32_agent.port.simulated.machine import (
    BOARD,
    GOLDEN,
    INPUT_BYTES,
    MODEL_SHA256,
    OUTPUT_BYTES,
    golden_input,
    golden_outputs,
)

STACK_BYTES = 512 * 1024
PROGRESS_S = 1.0


def main() -> int:
    """Runs the fleet to its end."""
    if "--model" in sys.argv:
        say(model())
        return 0
    asked = json.loads(sys.stdin.readline())
    plan = Plan(
        asked["url"],
        asked["seed"],
        asked["period_s"],
        asked["send_every_s"],
        asked["windows"],
        asked["faults"],
    )
    devices = [Device(plan, number, code) for number, code in asked["codes"]]
    times = Times(asked["seconds"], asked["drain_s"])
    threading.Thread(target=_stop_with_stdin, args=(times,), daemon=True).start()
    threading.stack_size(STACK_BYTES)
    threads = []
    for place, device in enumerate(devices):
        delay_s = max(plan.period_s, plan.send_every_s) * place / len(devices)
        threads.append(threading.Thread(target=_live, args=(device, times, delay_s), daemon=True))
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        time.sleep(PROGRESS_S)
        say(progress(devices))
    for device in devices:
        say(account(device))
    return 0


def _live(device: Device, times: Times, delay_s: float) -> None:
    """Not all at once: the devices of a real fleet were switched on at different moments."""
    time.sleep(delay_s)
    device.live(times)


def _stop_with_stdin(times: Times) -> None:
    sys.stdin.read()
    times.stop()


def say(document: "dict[str, object]") -> None:
    """One line of JSON."""
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


def progress(devices: "list[Device]") -> "dict[str, object]":
    """The sums so far."""
    accounts = [device.account for device in devices]
    return {
        "kind": "progress",
        "enrolled": sum(each.device_id is not None for each in accounts),
        "made": sum(len(each.made) for each in accounts),
        "acknowledged": sum(len(each.acknowledged) for each in accounts),
    }


def account(device: Device) -> "dict[str, object]":
    """What one device did and knows."""
    own = device.account
    return {
        "kind": "account",
        "device_id": own.device_id,
        "boots": own.boots,
        "reports": [
            {
                "boot_id": boot_id,
                "sequence": sequence,
                "fate": fate,
                "acknowledged": (boot_id, sequence) in own.acknowledged,
                "waits": (boot_id, sequence) in own.waiting,
                "digest": own.digests.get((boot_id, sequence)),
            }
            for (boot_id, sequence), fate in own.made.items()
        ],
        "quarantined": own.quarantined,
        "conflicts": own.conflicts,
        "statuses": {str(status): count for status, count in own.statuses.items()},
        "faults": device.faults.counts,
        "latencies_us": own.latencies_us,
    }


def model() -> "dict[str, object]":
    """What a manifest of the simulated model needs to say."""
    return {
        "sha256": MODEL_SHA256,
        "board": BOARD,
        "input_bytes": INPUT_BYTES,
        "output_bytes": OUTPUT_BYTES,
        "golden_inputs": [golden_input(number).hex() for number in range(GOLDEN)],
        "golden_outputs": [output.hex() for output in golden_outputs()],
    }


if __name__ == "__main__":
    sys.exit(main())
