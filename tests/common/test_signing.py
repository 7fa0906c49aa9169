import doctest
import os

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from dpmerge.common import receipt, signing
from dpmerge.common.errors import DpmergeError
from dpmerge.common.key_list import load_key_list
from dpmerge.common.signing import PublicKey, SigningKey, generate_key, load_key

# RFC 8032, section 7.1, test 2
SECRET = "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb"
PUBLIC = "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c"
SIGNED = (
    "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
    "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
)


def test_docstring_examples():
    assert doctest.testmod(signing).failed == doctest.testmod(receipt).failed == 0


def test_signatures_are_those_of_rfc_8032():
    key = SigningKey(bytes.fromhex(SECRET))
    assert str(key.public) == f"ed25519:{PUBLIC}"
    assert key.sign(b"\x72").hex() == SIGNED
    assert key.public.accepts(bytes.fromhex(SIGNED), b"\x72")
    assert not key.public.accepts(bytes.fromhex(SIGNED), b"\x73")
    assert SECRET not in repr(key)


def test_keys_are_found_again_in_both_forms(tmp_path):
    key = generate_key(tmp_path / "key.pem")
    assert (tmp_path / "key.pem").stat().st_mode & 0o777 == 0o600
    (tmp_path / "raw").touch(mode=0o600)
    secret = load_pem_private_key((tmp_path / "key.pem").read_bytes(), None)
    (tmp_path / "raw").write_bytes(secret.private_bytes_raw())
    assert load_key(tmp_path / "key.pem").public == load_key(tmp_path / "raw").public == key.public
    with pytest.raises(DpmergeError, match="never overwritten"):
        generate_key(tmp_path / "key.pem")
    assert load_key(tmp_path / "key.pem").public == key.public


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_key_that_others_can_read_is_refused(tmp_path, mode):
    generate_key(tmp_path / "key.pem")
    os.chmod(tmp_path / "key.pem", mode)
    with pytest.raises(DpmergeError, match=rf"DPM-205: .* others than its owner \(mode {mode:o}\)"):
        load_key(tmp_path / "key.pem")


def test_what_is_no_key_is_refused(tmp_path):
    path = tmp_path / "key"
    other = generate_private_key(SECP256R1()).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    secret = load_pem_private_key(SigningKey(bytes(32)).pem(), None)
    locked = secret.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"word"))
    path.touch(mode=0o600)
    for content in (b"", b"x" * 31, b"\xff" * 33, b"-----BEGIN PRIVATE KEY-----\nAA\n", other, locked):
        path.write_bytes(content)
        with pytest.raises(DpmergeError, match="DPM-205"):
            load_key(path)
    for missing in (tmp_path / "none", tmp_path):
        with pytest.raises(DpmergeError, match="DPM-205"):
            load_key(missing)
    for text in ("", PUBLIC, "ed25519:00", f"ed25519:{PUBLIC.upper()}"):
        with pytest.raises(DpmergeError, match="DPM-205"):
            PublicKey.parse(text)


LIST = f"""
schema = 1
[keys]
shop = "ed25519:{PUBLIC}"
[[revoked]]
key_id = "{"0" * 64}"
since = 2026-03-01T00:00:00+01:00
"""


def test_a_key_list_is_read(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(LIST)
    keys = load_key_list(path)
    assert keys.keys == {"shop": (PublicKey.parse(f"ed25519:{PUBLIC}"),)}
    assert keys.revoked["0" * 64].isoformat() == "2026-02-28T23:00:00+00:00"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("schema = 1", "schema = 2"),
        ("schema = 1", ""),
        ("schema = 1", "schema = 1\nextra = 1"),
        ("[keys]", "[keys"),
        ("shop =", '"../shop" ='),
        (f'"ed25519:{PUBLIC}"', "7"),
        (f'"ed25519:{PUBLIC}"', "[]"),
        (f'"ed25519:{PUBLIC}"', f'"ed25519:{PUBLIC}"\ncinema = "ed25519:{PUBLIC}"'),  # one key, two owners
        ("+01:00", ""),
        ("2026-03-01T00:00:00+01:00", '"soon"'),
        ("0" * 64, "0" * 63),
        ("key_id", "key"),
        ("[[revoked]]", "[revoked]"),
    ],
)
def test_what_is_no_key_list_is_refused(tmp_path, old, new):
    path = tmp_path / "keys.toml"
    path.write_text(LIST.replace(old, new, 1))
    with pytest.raises(DpmergeError, match="DPM-205"):
        load_key_list(path)
