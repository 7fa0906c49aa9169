import doctest
import os
import subprocess
import sys

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from dpmerge.client.privacy import keystream
from dpmerge.client.privacy.keystream import Keystream
from dpmerge.client.privacy.noise import FastNoise, SecureNoise
from dpmerge.client.privacy.sampling import PoissonSampler

KEY = bytes(range(32))


def test_docstring_examples():
    assert doctest.testmod(keystream).failed == 0


def test_words_are_chacha20s_keystream():
    expected = Cipher(algorithms.ChaCha20(KEY, bytes(16)), mode=None).encryptor().update(bytes(80))
    stream = Keystream(KEY)
    assert stream.words(3).tobytes() + stream.words(7).tobytes() == expected


def test_keys_come_from_the_operating_system(real_keys, monkeypatch):
    """The module's `os` is the operating system's own here, and a key is what one call of its `urandom` returned."""
    assert keystream.os is os
    assert len({Keystream().state() for _ in range(100)}) == 100
    drawn, real = [], os.urandom

    def urandom(size):
        drawn.append(real(size))
        return drawn[-1]

    monkeypatch.setattr(os, "urandom", urandom)
    assert [Keystream().state() for _ in range(3)] == drawn
    assert [len(key) for key in drawn] == [32] * 3


@pytest.mark.parametrize("make", [SecureNoise, FastNoise, lambda: PoissonSampler(0.5, 9)])
def test_noise_and_samples_take_a_key_each_from_the_operating_system(real_keys, monkeypatch, make):
    drawn, real = [], os.urandom

    def urandom(size):
        drawn.append(real(size))
        return drawn[-1]

    monkeypatch.setattr(os, "urandom", urandom)
    states = {make().state() for _ in range(3)}
    assert len(states) == len(set(drawn)) == 3


def test_tests_have_known_keys_unless_they_ask_for_real_ones():
    assert keystream.os is not os


def test_a_process_of_its_own_draws_afresh():
    """What a deployed party runs: no test's patch reaches it, and no two processes share a key."""
    code = "from dpmerge.client.privacy.keystream import Keystream; print(Keystream().state().hex())"
    keys = {subprocess.check_output([sys.executable, "-c", code], text=True) for _ in range(2)}
    assert len(keys) == 2


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
