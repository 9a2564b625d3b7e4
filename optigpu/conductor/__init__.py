"""The conductor's parts: the measuring process as it sees it, the device's lock, the job's pace, the outcome."""
