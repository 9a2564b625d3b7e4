"""Conflicts of the layers of this folder with techniques, with reasons. Read when a job is posted: imports no torch."""

FOUR_BITS = {
    "autocast": "the 4-bit operator computes in the dtype of its inputs, which autocast does not change",
    "cpu_offload": "weights are packed for the device that loads them, and an offloaded model is loaded on the CPU",
    "grad_enabled": "4-bit weights have no gradient",
}
FUSED_NORMS = {
    "cpu_offload": "a block reads the weights of the next block's norm, which are not on the GPU yet",
    "grad_enabled": "the fused norms have no gradient",
}
