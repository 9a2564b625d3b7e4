"""Engines that cannot share OptiGPU's environment: each gets one of its own, under the cache folder.

`recipes.py` says how each is made, `install.py` makes it, and `environments.py` finds it: a measuring process of such a
backend runs with the interpreter of its environment.
"""
