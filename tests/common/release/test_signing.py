import doctest
import os
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from dpmerge.common.config.rules import PARTY_NAME
from dpmerge.common.errors import DpmergeError
from dpmerge.common.release import receipt, signing
from dpmerge.common.release.key_list import MAX_LIST_BYTES, load_key_list
from dpmerge.common.release.signing import PublicKey, SigningKey, generate_key, load_key, parse_sealed, seal
from dpmerge.common.untrusted.parsing import ReleaseRefused

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
        ("schema = 1", "schema = " + "[" * 100_000),
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


PRIME, D = 2**255 - 19, -121665 * pow(121666, -1, 2**255 - 19)
SMALL = (
    *("0" * 64, "0" * 62 + "80", "01" + "0" * 62, "01" + "0" * 60 + "80"),
    *("ec" + "f" * 60 + "7f", "ec" + "f" * 62),
    *("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc" + end for end in ("05", "85")),
    *("c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac03" + end for end in ("7a", "fa")),
)
UNUSUAL = ("ed" + "f" * 60 + "7f", "ee" + "f" * 60 + "7f", "f" * 64, "ed" + "f" * 62)  # y = p, p + 1, ...


@pytest.mark.parametrize("raw", [*SMALL, *UNUSUAL])
def test_keys_for_which_anybody_can_sign_are_refused(raw: str) -> None:
    with pytest.raises(ValueError, match="of large order"):
        PublicKey(bytes.fromhex(raw))
    with pytest.raises(DpmergeError, match="weak public key"):
        PublicKey.parse(f"ed25519:{raw}")


def test_the_list_of_weak_keys_is_that_of_all_points_of_small_order() -> None:
    """Eight times each is the neutral point, by the curve's own addition law, and there are eight of them."""
    points = {
        point for y in {int.from_bytes(bytes.fromhex(raw), "little") % 2**255 for raw in SMALL} for point in at(y)
    }
    assert len(points) == 8
    for point in points:
        for _ in range(3):
            point = added(point, point)
        assert point == (0, 1)


def at(y: int) -> set[tuple[int, int]]:
    """Return the points (x, y) of −x² + y² = 1 + d x² y²."""
    square = (y * y - 1) * pow(D * y * y + 1, -1, PRIME) % PRIME
    root = pow(square, (PRIME + 3) // 8, PRIME)
    if root * root % PRIME != square:
        root = root * pow(2, (PRIME - 1) // 4, PRIME) % PRIME
    assert root * root % PRIME == square
    return {(root, y), (-root % PRIME, y)}


def added(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    (a, b), (c, e) = one, other
    product = D * a * b * c * e
    x = (a * e + b * c) * pow(1 + product, -1, PRIME) % PRIME
    return x, (b * e + a * c) * pow(1 - product, -1, PRIME) % PRIME


@pytest.mark.parametrize("schema", [b"true", b"1.0", b"1e0", b"2", b"null"])
def test_a_sealed_object_has_one_form_that_needs_no_key_to_tell(schema: bytes) -> None:
    data = seal(SigningKey(bytes([1]) * 32), "receipt", {"party": "shop"})
    assert b'"schema":1' in data
    with pytest.raises(ReleaseRefused, match="signature"):
        parse_sealed(data.replace(b'"schema":1', b'"schema":' + schema), "receipt", "example")


@pytest.mark.parametrize("schema", ["true", "1.0", '"1"'])
def test_a_key_list_of_another_kind_of_schema_is_refused(tmp_path: Path, schema: str) -> None:
    (tmp_path / "keys.toml").write_text(f"schema = {schema}\n[keys]\n")
    with pytest.raises(DpmergeError, match="schema = 1"):
        load_key_list(tmp_path / "keys.toml")


def test_a_key_list_above_its_size_is_refused_and_not_cut(tmp_path: Path) -> None:
    key = SigningKey(bytes([1]) * 32).public
    text = f'schema = 1\n[keys]\nshop = "{key}"\n' + "#" * 79 + "\n"
    (tmp_path / "keys.toml").write_text(text + ("#" * 79 + "\n") * (MAX_LIST_BYTES // 80))
    with pytest.raises(DpmergeError, match="bytes"):
        load_key_list(tmp_path / "keys.toml")


@pytest.mark.parametrize("name", ["con", "prn", "aux", "nul", "com1", "lpt9"])
def test_names_of_devices_are_no_partys(name: str) -> None:
    assert PARTY_NAME.fullmatch(name) is None
    assert PARTY_NAME.fullmatch(f"{name}s") is not None
