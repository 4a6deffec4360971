"""Models whose compiled programs several modules share."""

import pytest

import dspark_jax as dspark
from tests.decoding.scripts import byte_model


@pytest.fixture(scope="session")
def bytes_model() -> dspark.Model:
    """Text that mostly runs through the alphabet."""
    return byte_model("pxabcdefghij")
