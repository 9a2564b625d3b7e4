"""The checks of `optigpu selftest`: every technique, kernel and meter against its reference on this machine. What is
checked follows from the registries: a technique from `TECHNIQUES` (its `trials` and `error_bound`), a kernel from the
`selftest.py` in its folder of `optigpu.ops`, a meter from `METERS` (its `self_test`). optigpu.conductor.tasks runs
them in separate processes, and `kept.py` keeps the outcome. Nothing here loads torch before a check runs."""
