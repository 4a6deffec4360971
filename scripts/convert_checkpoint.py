"""Converts a published checkpoint: convert_checkpoint.py SRC DST [--dtype ...]."""

from dspark_jax.cli.convert import main

if __name__ == "__main__":
    main()
