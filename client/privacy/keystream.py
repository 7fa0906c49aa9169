"""Cryptographic random bits that forget: a ChaCha20 keystream whose key is replaced after use.

torch's and numpy's generators are not cryptographic: their state can be recovered from their output. Here the key
comes from the operating system; after each logical step `ratchet` replaces it by keystream that is used for nothing
else, so that a state found later (in a checkpoint, say) reveals nothing drawn before it.

References:
    RFC 8439 (ChaCha20); the ratchet is "fast key erasure" (Bernstein, 2017).
"""

import os

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from numpy.typing import NDArray

KEY_BYTES = 32


class Keystream:
    """A stream of uniform 64-bit words.

    Args:
        key: 32 secret bytes; None asks the operating system.

    Raises:
        ValueError: If the key has another length.

    >>> one, two = Keystream(bytes(32)), Keystream(bytes(32))
    >>> bool((one.words(4) == two.words(4)).all())
    True
    >>> one.ratchet()
    >>> bool((one.words(4) == two.words(4)).all())
    False
    """

    def __init__(self, key: bytes | None = None) -> None:
        key = os.urandom(KEY_BYTES) if key is None else key
        if len(key) != KEY_BYTES:
            raise ValueError(f"Expected a key of {KEY_BYTES} bytes, not {len(key)}.")
        self._start(key)

    def _start(self, key: bytes) -> None:
        self._key = bytearray(key)
        # Counter and nonce start at zero: each key is used for one stream only.
        self._cipher = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()
        self._used = False

    def words(self, count: int) -> NDArray[np.uint64]:
        """Return the next `count` words, uniform on [0, 2⁶⁴)."""
        self._refuse_erased()
        self._used = True
        return np.frombuffer(self._cipher.update(bytes(8 * count)), dtype="<u8")

    def ratchet(self) -> None:
        """Replace the key by the next 32 bytes of the stream; what was drawn before can no longer be recomputed."""
        key = self.words(KEY_BYTES // 8).tobytes()
        self.erase()
        self._start(key)

    def state(self) -> bytes:
        """Return the key, for a checkpoint.

        Raises:
            RuntimeError: If words were drawn since the last ratchet: whoever resumed from it would draw them again.
        """
        self._refuse_erased()
        if self._used:
            raise RuntimeError("Expected a ratchet before state(): a resume would repeat random numbers already used.")
        return bytes(self._key)

    def erase(self) -> None:
        """Overwrite the key; the stream refuses every further use."""
        self._key[:] = bytes(len(self._key))
        del self._key[:], self._cipher

    def _refuse_erased(self) -> None:
        if not self._key:
            raise RuntimeError("Expected a live keystream: this one has been erased.")
