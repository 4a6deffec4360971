"""The examples in the docstrings run."""

import doctest

import pytest

from dspark_jax.text import stop_strings, stream_decoder


@pytest.mark.parametrize("module", [stop_strings, stream_decoder])
def test_docstring_examples(module):
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0
