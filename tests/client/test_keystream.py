import doctest

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from dpmerge.client import keystream
from dpmerge.client.keystream import Keystream

KEY = bytes(range(32))


def test_docstring_examples():
    assert doctest.testmod(keystream).failed == 0


def test_words_are_chacha20s_keystream():
    expected = Cipher(algorithms.ChaCha20(KEY, bytes(16)), mode=None).encryptor().update(bytes(80))
    stream = Keystream(KEY)
    assert stream.words(3).tobytes() + stream.words(7).tobytes() == expected


def test_keys_come_from_the_operating_system():
    assert Keystream().state() != Keystream().state()


def test_ratchet_replaces_the_key_and_repeats_nothing():
    stream = Keystream(KEY)
    before = stream.words(100)
    stream.ratchet()
    assert stream.state() != KEY
    assert not np.intersect1d(before, stream.words(100)).size


def test_state_continues_the_stream_where_it_stood():
    stream = Keystream(KEY)
    stream.words(5)
    stream.ratchet()
    resumed = Keystream(stream.state())
    assert (resumed.words(5) == stream.words(5)).all()


def test_state_between_ratchets_is_refused():
    stream = Keystream(KEY)
    stream.words(1)
    with pytest.raises(RuntimeError, match="ratchet"):
        stream.state()


@pytest.mark.parametrize("use", [lambda s: s.words(1), Keystream.ratchet, Keystream.state])
def test_an_erased_stream_is_of_no_use(use):
    stream = Keystream(KEY)
    stream.erase()
    with pytest.raises(RuntimeError, match="erased"):
        use(stream)


def test_a_short_key_is_refused():
    with pytest.raises(ValueError, match="32 bytes"):
        Keystream(b"short")
