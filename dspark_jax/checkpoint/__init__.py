"""Reading published checkpoints and storing converted ones.

`load.read_params` reads any supported format; `convert.convert` stores one as an
Orbax directory. `store` is the only module that imports Orbax.
"""
