"""Claims about signatures: what a trusted key did not sign is refused, and keys are guarded."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from fusewright.compiler.artifacts import signing
from fusewright.compiler.artifacts.artifact import SIGNATURE, Artifact, Refusal
from fusewright.compiler.artifacts.store import Store
from fusewright.config import UserError
from tests.compiler.store_process import FILES, contents, key, own, publish


class Keys:
    """Key files in a folder: ``<name>.key`` is private, ``trusted/<name>.pem`` public."""

    def __init__(self, folder: Path) -> None:
        self.trusted = folder / "trusted"
        self.trusted.mkdir()
        self.folder = folder

    def private(self, name: str) -> Path:
        path = self.folder / f"{name}.key"
        private = Ed25519PrivateKey.generate()
        pem = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        path.write_bytes(pem)
        path.chmod(0o600)
        public = private.public_key()
        pem = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        self.public(name).write_bytes(pem)
        self.public(name).chmod(0o644)
        return path

    def public(self, name: str) -> Path:
        return self.trusted / f"{name}.pem"


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path)


def trusting(root: Path, *trusted: Path) -> Store:
    return own(root, trusted_keys=trusted)


def refusal(store: Store) -> str:
    assert store.find(key()) is None
    (refused,) = store.refusals
    return str(refused)


def test_what_a_trusted_key_signed_is_found(tmp_path: Path, keys: Keys) -> None:
    artifact = publish(own(tmp_path / "store"))
    name = signing.sign(artifact, keys.private("builder"))
    keys.private("other")
    for trusted in (keys.public("builder"), keys.trusted):
        store = trusting(tmp_path / "store", trusted)
        assert store.find(key()) == artifact, store.refusals
    assert signing.verify(artifact, signing.trusted_keys([keys.trusted])) == name
    assert signing.signer(artifact) == name
    assert own(tmp_path / "store").find(key()) == artifact
    assert (artifact.path / SIGNATURE).stat().st_mode & 0o777 == 0o644


def test_the_signature_is_one_that_openssl_checks(tmp_path: Path, keys: Keys) -> None:
    import base64
    import json

    artifact = publish(own(tmp_path / "store"))
    signing.sign(artifact, keys.private("builder"))
    document = json.loads((artifact.path / SIGNATURE).read_bytes())
    (tmp_path / "signature").write_bytes(base64.b64decode(document["signature"]))
    prefix = b"fusewright artifact manifest, format 1\n"
    (tmp_path / "message").write_bytes(prefix + (artifact.path / "manifest.json").read_bytes())
    command = ["openssl", "pkeyutl", "-verify", "-rawin", "-pubin"]
    files = ["-inkey", keys.public("builder"), "-sigfile", tmp_path / "signature"]
    try:
        done = subprocess.run([*command, *files, "-in", tmp_path / "message"], capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    assert (done.returncode, done.stdout.strip()) == (0, b"Signature Verified Successfully")


def test_unsigned_is_refused(tmp_path: Path, keys: Keys) -> None:
    path = publish(own(tmp_path / "store")).path
    keys.private("builder")
    message = refusal(trusting(tmp_path / "store", keys.trusted))
    assert message.startswith(f"{path}/signature.json: is missing, expected the signature of")
    assert "`fusewright cache sign`" in message


def test_the_signature_of_another_key_is_refused(tmp_path: Path, keys: Keys) -> None:
    name = signing.sign(publish(own(tmp_path / "store")), keys.private("stranger"))
    keys.private("builder")
    message = refusal(trusting(tmp_path / "store", keys.public("builder")))
    assert f"signature.json: is by key {name[:12]}, trusted are " in message


def test_a_signature_that_only_names_a_trusted_key_is_refused(tmp_path: Path, keys: Keys) -> None:
    artifact = publish(own(tmp_path / "store"))
    trusted = signing.sign(artifact, keys.private("builder"))
    stranger = signing.sign(artifact, keys.private("stranger"))
    path = artifact.path / SIGNATURE
    path.write_text(path.read_text().replace(stranger, trusted))
    message = refusal(trusting(tmp_path / "store", keys.public("builder")))
    assert f"signature.json: is not by key {trusted[:12]}, as it says" in message


def test_the_signature_of_another_artifact_is_refused(tmp_path: Path, keys: Keys) -> None:
    one, two = (publish(own(tmp_path / "store"), number) for number in range(2))
    signing.sign(two, keys.private("builder"))
    (one.path / SIGNATURE).write_bytes((two.path / SIGNATURE).read_bytes())
    assert "is not by key" in refusal(trusting(tmp_path / "store", keys.trusted))


def test_a_changed_file_under_a_sound_signature_is_refused(tmp_path: Path, keys: Keys) -> None:
    artifact = publish(own(tmp_path / "store"))
    signing.sign(artifact, keys.private("builder"))
    (artifact.path / "plan.json").write_bytes(b'{"steps": {}}\n')
    assert "plan.json: has SHA-256" in refusal(trusting(tmp_path / "store", keys.trusted))


def test_flipped_bits_of_a_signature_are_refused(tmp_path: Path, keys: Keys, fw_seed: int) -> None:
    artifact = publish(own(tmp_path / "store"))
    signing.sign(artifact, keys.private("builder"))
    trusted = signing.trusted_keys([keys.trusted])
    path, rng = artifact.path / SIGNATURE, random.Random(fw_seed)
    sound = path.read_bytes()
    for position in range(len(sound)):
        flipped = bytearray(sound)
        flipped[position] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        with pytest.raises(Refusal, match=r"signature\.json: is "):
            signing.verify(artifact, trusted)
    for broken in (b"", sound[:-1], b"[]", b"null", b"[" * 50_000, b'{"key_id": [1]}', b"\xff"):
        path.write_bytes(broken)
        with pytest.raises(Refusal, match=r"signature\.json: is no signature"):
            signing.verify(artifact, trusted)
        assert signing.signer(artifact) is None
    path.write_bytes(sound)
    signing.verify(artifact, trusted)


def test_a_broken_artifact_is_not_signed(tmp_path: Path, keys: Keys) -> None:
    artifact = publish(own(tmp_path / "store"))
    (artifact.path / "plan.json").write_bytes(b"")
    with pytest.raises(Refusal):
        signing.sign(artifact, keys.private("builder"))
    assert artifact.signature() is None


@pytest.mark.parametrize("name", ["image", "image.tar"])
def test_signatures_travel_and_are_demanded_of_imports(
    name: str, tmp_path: Path, keys: Keys
) -> None:
    store = own(tmp_path / "store")
    artifact = publish(store)
    keys.private("stranger")
    store.export(key().digest, tmp_path / f"unsigned-{name}")
    signing.sign(artifact, keys.private("builder"))
    store.export(key().digest, tmp_path / name)
    other = trusting(tmp_path / "other", keys.public("builder"))
    with pytest.raises(Refusal, match=r"is missing, expected the signature"):
        other.import_(tmp_path / f"unsigned-{name}")
    with pytest.raises(Refusal, match="is by key"):
        trusting(tmp_path / "other", keys.public("stranger")).import_(tmp_path / name)
    assert not (tmp_path / "other").exists()
    other.import_(tmp_path / name)
    found = other.find(key())
    assert found is not None
    assert contents(found) == FILES
    assert found.signature() == artifact.signature()


def test_an_unsigned_artifact_is_replaced_by_a_signed_one(tmp_path: Path, keys: Keys) -> None:
    signed = publish(own(tmp_path / "store"))
    signing.sign(signed, keys.private("builder"))
    own(tmp_path / "store").export(key().digest, tmp_path / "image")
    publish(own(tmp_path / "other"))
    store = trusting(tmp_path / "other", keys.trusted)
    assert store.find(key()) is None
    store.import_(tmp_path / "image")
    assert store.find(key()) is not None


# Keys that are not used


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_private_key_that_others_may_use_is_refused(
    mode: int, tmp_path: Path, keys: Keys
) -> None:
    path = keys.private("builder")
    path.chmod(mode)
    with pytest.raises(UserError, match=r"others may use it .*, expected 0600; chmod 600"):
        signing.sign(publish(own(tmp_path / "store")), path)


@pytest.mark.parametrize("mode", [0o664, 0o646])
def test_a_trusted_key_that_others_may_write_is_refused(
    mode: int, tmp_path: Path, keys: Keys
) -> None:
    keys.private("builder")
    keys.public("builder").chmod(mode)
    with pytest.raises(UserError, match="a trusted key must be yours alone to change"):
        trusting(tmp_path / "store", keys.trusted)


def private_pem(kind: str) -> bytes:
    if kind == "another algorithm":
        other = generate_private_key(SECP256R1())
        return other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    if kind == "encrypted":
        encryption = BestAvailableEncryption(b"secret")
        ed25519 = Ed25519PrivateKey.generate()
        return ed25519.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)
    return b"no key"


@pytest.mark.parametrize("kind", ["another algorithm", "encrypted", "nonsense"])
def test_what_is_no_private_key_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(private_pem(kind))
    path.chmod(0o600)
    artifact = publish(own(tmp_path / "store"))
    with pytest.raises(UserError, match="not an unencrypted Ed25519 private key in PEM form"):
        signing.sign(artifact, path)
    with pytest.raises(UserError, match="not an unencrypted Ed25519 public key in PEM form"):
        signing.trusted_keys([path])


def test_missing_keys_are_named(tmp_path: Path, keys: Keys) -> None:
    with pytest.raises(UserError, match=r"absent\.pem: No such file or directory; give a PEM"):
        signing.trusted_keys([tmp_path / "absent.pem"])
    with pytest.raises(UserError, match=r"trusted: holds no \*\.pem"):
        signing.trusted_keys([keys.trusted])
    with pytest.raises(UserError, match="absent: No such file"):
        signing.sign(publish(own(tmp_path / "store")), tmp_path / "absent")


def test_without_cryptography_only_signatures_fail(tmp_path: Path, keys: Keys) -> None:
    keys.private("builder")
    publish(own(tmp_path / "store"))
    code = f"""
import sys
sys.modules["cryptography"] = None
from pathlib import Path
from fusewright.compiler.artifacts.store import Store
from fusewright.config import UserError
root = Path({str(tmp_path)!r})
assert len(Store([root / "store"]).ls()) == 1
try:
    Store([root / "store"], trusted_keys=[root / "trusted"])
except UserError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, timeout=300
    )
    assert done.stderr == ""
    assert done.stdout == (
        "signatures need the package cryptography: pip install 'fusewright[sign]'\n"
    )


def test_an_artifact_opens_without_its_signature_being_read(tmp_path: Path) -> None:
    artifact = publish(own(tmp_path / "store"))
    (artifact.path / SIGNATURE).write_bytes(b"nonsense")
    assert Artifact.open(artifact.path) == artifact
    assert own(tmp_path / "store").find(key()) == artifact
