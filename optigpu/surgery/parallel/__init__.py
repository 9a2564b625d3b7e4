"""A decoder divided among several processes of one machine, which talk through torch.distributed.

The measuring process is rank 0 and runs the model as before. Ahead of each pass it announces what the others should run
with it: `ranks.py` is its side, `rank.py` the program of the others, `messages.py` what they say. `tensor.py` divides
matrices, `pipeline.py` the list of blocks.
"""
