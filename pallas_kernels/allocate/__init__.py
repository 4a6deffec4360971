"""Allocation: how many rows each request gets of a round's total."""

from pallas_kernels.allocate.api import allocate, carried, survival

__all__ = ["allocate", "carried", "survival"]
