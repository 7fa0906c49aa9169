"""The texts of `dpmerge merge`; what is refused of them is in commands/test_merge.py."""

import doctest

from dpmerge.cli import merge_texts


def test_the_examples_hold():
    results = doctest.testmod(merge_texts)
    assert (results.failed, results.attempted) == (0, 2)
