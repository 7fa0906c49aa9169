"""Ed25519 keys, and JSON sealed with them: one canonical form, so that one content is one sequence of bytes.

A sealed object is canonical JSON (RFC 8785): `schema`, the body under the name of its kind, `key_id`, and `signature`
over the canonical JSON of the other three. The kind is signed too: a sealed manifest cannot pass for a receipt.

>>> key = SigningKey(bytes(32))
>>> data = seal(key, "receipt", {"party": "shop"})
>>> sealed = parse_sealed(data, "receipt", "example")
>>> sealed.body, sealed.key_id == key.public.id, sealed.is_signed_by(key.public)
({'party': 'shop'}, True, True)
"""

import hashlib
import os
import re
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import rfc8785
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from dpmerge.common.errors import DpmergeError
from dpmerge.common.files import fsync_folder, open_regular
from dpmerge.common.untrusted.kinds import Unfit, exactly, record, table_of, text
from dpmerge.common.untrusted.kinds import plain as plain_json
from dpmerge.common.untrusted.parsing import ReleaseRefused, parse_json

SCHEMA = 1
KEY_BYTES = 32
MAX_KEY_FILE_BYTES = 4096
MAX_SEALED_BYTES = 1 << 16
"""A manifest of the seven files of a release, with the longest names, needs 2 kB."""

SHA256 = re.compile(r"[0-9a-f]{64}")
_PUBLIC = re.compile(r"ed25519:([0-9a-f]{64})")
_SIGNATURE = re.compile(r"[0-9a-f]{128}")
_BODY = table_of(text(63), plain_json(most=1000, depth=8, longest=1000), most=32)

_PRIME = 2**255 - 19
_SMALL_ORDER = frozenset(
    {
        0,
        1,
        _PRIME - 1,
        int.from_bytes(bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"), "little"),
        int.from_bytes(bytes.fromhex("c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a"), "little"),
    }
)
"""The y of the eight points of order 1, 2, 4 and 8, two of which share each of the last three but one sign bit."""


@dataclass(frozen=True)
class PublicKey:
    """The public half of a key; written as `ed25519:` and 64 hex digits, so that nobody takes it for a hash.

    Attributes:
        raw: 32 bytes.
    """

    raw: bytes

    def __post_init__(self) -> None:
        if len(self.raw) != KEY_BYTES:
            raise ValueError(f"Expected a public key of {len(self.raw)} bytes to have {KEY_BYTES}.")
        y = int.from_bytes(self.raw, "little") & ((1 << 255) - 1)
        if y >= _PRIME or y in _SMALL_ORDER:  # a second spelling of a key, or one that accepts forged signatures
            raise ValueError(f"Expected the public key {self.raw.hex()} to be canonical and of large order.")

    @classmethod
    def parse(cls, text: str) -> "PublicKey":
        """Read a public key as it is written in key lists.

        Raises:
            DpmergeError: DPM-205 if the text is none.
        """
        match = _PUBLIC.fullmatch(text)
        if match is None:
            fix = "write ed25519: and the 64 hex digits that its owner gives you"
            raise DpmergeError("DPM-205", f"{text[:80]!r} is no public key", fix)
        try:
            return cls(bytes.fromhex(match[1]))
        except ValueError as error:
            fix = "have its owner make another key; signatures could be forged for this one"
            raise DpmergeError("DPM-205", f"{text!r} is a weak public key", fix) from error

    @property
    def id(self) -> str:
        """SHA-256 of the raw key: how signatures and revocations name it."""
        return hashlib.sha256(self.raw).hexdigest()

    def __str__(self) -> str:
        return f"ed25519:{self.raw.hex()}"

    def accepts(self, signature: bytes, message: bytes) -> bool:
        """Whether the signature is this key's over the message."""
        try:
            Ed25519PublicKey.from_public_bytes(self.raw).verify(signature, message)
        except InvalidSignature:
            return False
        return True


class SigningKey:
    """A private Ed25519 key. Its text form shows the public half only.

    Args:
        seed: The 32 secret bytes.
    """

    def __init__(self, seed: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(seed)

    def __repr__(self) -> str:
        return f"SigningKey({self.public})"

    @cached_property
    def public(self) -> PublicKey:
        """The half that others check signatures with."""
        return PublicKey(self._key.public_key().public_bytes_raw())

    def sign(self, message: bytes) -> bytes:
        """Return the 64 bytes of the signature; the same message always gives the same."""
        return self._key.sign(message)

    def pem(self) -> bytes:
        """Return the secret as unencrypted PKCS#8 PEM."""
        return self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def generate_key(path: Path) -> SigningKey:
    """Make a new key and write it, readable by its owner only and never over another file.

    Raises:
        DpmergeError: DPM-205 if the file exists or cannot be written.
    """
    key = SigningKey(secrets.token_bytes(KEY_BYTES))
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(key.pem())
            file.flush()
            os.fsync(descriptor)
        fsync_folder(path.parent)
    except OSError as problem:
        fix = "give a new file in an existing folder; a key is never overwritten"
        raise DpmergeError("DPM-205", f"{path} cannot be written: {problem.strerror}", fix) from None
    return key


def load_key(path: Path) -> SigningKey:
    """Read a signing key: PKCS#8 PEM without a password, or 32 raw bytes.

    Raises:
        DpmergeError: DPM-205 if it cannot be read, is of no known form, or others than its owner can read it.
    """
    fix = "give an Ed25519 key as PKCS#8 PEM without a password, or as 32 raw bytes"
    try:
        with open_regular(path) as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            data = file.read(MAX_KEY_FILE_BYTES)
    except OSError as problem:
        raise DpmergeError("DPM-205", f"{path} cannot be read: {problem.strerror}", fix) from None
    if mode & 0o077:
        remedy = f"run chmod 600 {path}, or make a new key if others had access"
        raise DpmergeError("DPM-205", f"{path} can be read by others than its owner (mode {mode:o})", remedy)
    if len(data) == KEY_BYTES:
        return SigningKey(data)
    try:
        key = load_pem_private_key(data, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):  # TypeError: the file wants a password
        raise DpmergeError("DPM-205", f"{path} holds no key that can be used", fix) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise DpmergeError("DPM-205", f"{path} holds a key of another kind than Ed25519", fix)
    return SigningKey(key.private_bytes_raw())


@dataclass(frozen=True)
class Sealed:
    """A sealed object as read; nothing in it is true before `is_signed_by` says so of a key that is known otherwise."""

    kind: str
    body: dict[str, Any]
    key_id: str
    signature: bytes

    def is_signed_by(self, key: PublicKey) -> bool:
        """Whether this very key signed it, and is the one that it names."""
        message = _message(self.kind, self.body, self.key_id)
        return self.key_id == key.id and key.accepts(self.signature, message)


def seal(key: SigningKey, kind: str, body: Mapping[str, Any]) -> bytes:
    """Return the sealed object's bytes; equal key and body give equal bytes."""
    message = _message(kind, body, key.public.id)
    return rfc8785.dumps(_envelope(kind, body, key.public.id) | {"signature": key.sign(message).hex()})


def parse_sealed(data: bytes, kind: str, origin: str) -> Sealed:
    """Read a sealed object's outer form; its signature is not checked yet.

    Raises:
        ReleaseRefused: size, json, or signature if it is not in the one form in which `seal` writes.
    """
    fix = "send the file as dpmerge wrote it"
    if len(data) > MAX_SEALED_BYTES:
        raise ReleaseRefused("size", f"{origin}: {len(data)} bytes", f"keep it under {MAX_SEALED_BYTES} bytes")
    value = parse_json(data, origin)
    hashes = {"key_id": text(64, SHA256), "signature": text(128, _SIGNATURE)}
    try:
        record({"schema": exactly(SCHEMA), kind: _BODY, **hashes})(value, f"the {kind}")
    except Unfit as error:
        raise ReleaseRefused("signature", f"{origin}: {error}", fix) from error
    sealed = Sealed(kind, value[kind], value["key_id"], bytes.fromhex(value["signature"]))
    if not _is_form_of(data, sealed):
        raise ReleaseRefused("signature", f"{origin}: not in canonical form", fix)
    return sealed


def _envelope(kind: str, body: Mapping[str, Any], key_id: str) -> dict[str, Any]:
    return {"schema": SCHEMA, kind: dict(body), "key_id": key_id}


def _message(kind: str, body: Mapping[str, Any], key_id: str) -> bytes:
    return rfc8785.dumps(_envelope(kind, body, key_id))


def _is_form_of(data: bytes, sealed: Sealed) -> bool:
    """Whether the bytes are those in which `seal` would write what was understood."""
    envelope = _envelope(sealed.kind, sealed.body, sealed.key_id)
    try:
        return rfc8785.dumps(envelope | {"signature": sealed.signature.hex()}) == data
    except rfc8785.CanonicalizationError:  # an integer of exactly ±2**53
        return False
