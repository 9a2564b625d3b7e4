"""Recipes whose outcome is a smaller model: distillation into fewer layers, and neurons taken out of each MLP.
`request` says what is asked for and what came of it. `make` makes the model, in a process of its own that
`optigpu.conductor.tasks` starts; `measured` makes the job that compares it with its teacher."""
