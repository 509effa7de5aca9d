"""Signs artifacts with Ed25519 and verifies their signatures.

The manifest is signed, and it holds the digest of every file; so one signature covers all bytes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from ...config import UserError
from . import disk
from .artifact import SIGNATURE, Artifact, Manifest, Refusal, canonical_json

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

TrustedKeys: TypeAlias = "Mapping[str, Ed25519PublicKey]"
"""Key id, the SHA-256 of the raw key, -> public key."""

_DOMAIN = b"fusewright artifact manifest, format 1\n"
_MAX_PEM_BYTES = 2**16
_KEY_ID = re.compile(r"[0-9a-f]{64}")


def sign(artifact: Artifact, private_key: Path) -> str:
    """Sign an artifact in its folder; returns the id of the key.

    Args:
        private_key: a PEM file with an Ed25519 key that is not encrypted, readable by its owner
            alone.

    Raises:
        UserError: the key cannot be used, or the folder cannot be written.
        Refusal: the artifact is not what its manifest says.
    """
    _require_cryptography()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    data = _read_pem(private_key)
    if mode := stat.S_IMODE(private_key.stat().st_mode) & 0o077:
        raise UserError(
            f"{private_key}: others may use it (mode bits {mode:03o}), expected 0600; "
            f"chmod 600 {private_key}"
        )
    try:
        key = load_pem_private_key(data, password=None)
    except (ValueError, TypeError) as error:
        raise _bad_key(private_key, "private", error) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise _bad_key(private_key, "private", type(key).__name__)
    artifact.verify()
    name = _key_id(key.public_key())
    signature = key.sign(_DOMAIN + artifact.manifest.encode())
    partial = artifact.path.with_name(f".{artifact.path.name}.{SIGNATURE}")
    try:
        disk.replace_file(artifact.path / SIGNATURE, _encode(name, signature), partial)
    except OSError as error:
        raise UserError(
            f"{artifact.path / SIGNATURE}: cannot be written: {error.strerror}; "
            "sign a copy: `fusewright cache export`"
        ) from error
    return name


def verify(artifact: Artifact, trusted: TrustedKeys) -> str:
    """The id of the trusted key that signed the manifest.

    Raises:
        Refusal: there is no signature, none by a trusted key, or it does not fit.
    """
    return verify_bytes(artifact.manifest, artifact.signature(), trusted, artifact.path / SIGNATURE)


def verify_bytes(
    manifest: Manifest, signature: bytes | None, trusted: TrustedKeys, path: Path
) -> str:
    """``verify()`` of a signature file's content, which was found at ``path``."""
    from cryptography.exceptions import InvalidSignature

    remedy = "sign it with a trusted key: `fusewright cache sign`, or trust its signer"
    if signature is None:
        raise Refusal(path, "is missing, expected the signature of a trusted key", remedy)
    try:
        name, value = _decode(signature)
    except ValueError as error:
        raise Refusal(path, f"is no signature: {error}", remedy) from error
    if name not in trusted:
        known = ", ".join(key[:12] for key in trusted)
        raise Refusal(path, f"is by key {name[:12]}, trusted are {known}", remedy)
    try:
        trusted[name].verify(value, _DOMAIN + manifest.encode())
    except InvalidSignature as error:
        raise Refusal(path, f"is not by key {name[:12]}, as it says", remedy) from error
    return name


def signer(artifact: Artifact) -> str | None:
    """The id of the key that an artifact says it is signed by, unverified; None without one."""
    signature = artifact.signature()
    try:
        return None if signature is None else _decode(signature)[0]
    except ValueError:
        return None


def trusted_keys(paths: Iterable[Path]) -> TrustedKeys:
    """Key id -> public key of PEM files, and of every ``*.pem`` in folders.

    Raises:
        UserError: a file cannot be used, others may write it, or a folder has none.
    """
    keys: dict[str, Ed25519PublicKey] = {}
    for path in paths:
        files = sorted(path.glob("*.pem")) if path.is_dir() else [path]
        if not files:
            raise UserError(f"{path}: holds no *.pem; give a folder or file of public keys")
        for file in files:
            key = _public_key(file)
            keys[_key_id(key)] = key
    return keys


def _public_key(path: Path) -> Ed25519PublicKey:
    _require_cryptography()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    data = _read_pem(path)
    if reason := disk.distrust(path.stat()):
        raise UserError(f"{path}: {reason}; a trusted key must be yours alone to change")
    try:
        key = load_pem_public_key(data)
    except ValueError as error:
        raise _bad_key(path, "public", error) from error
    if not isinstance(key, Ed25519PublicKey):
        raise _bad_key(path, "public", type(key).__name__)
    return key


def _key_id(key: Ed25519PublicKey) -> str:
    return hashlib.sha256(key.public_bytes_raw()).hexdigest()


def _read_pem(path: Path) -> bytes:
    try:
        return disk.read_file(path.resolve(), _MAX_PEM_BYTES)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give a PEM file") from error


def _bad_key(path: Path, kind: str, reason: object) -> UserError:
    return UserError(
        f"{path}: not an unencrypted Ed25519 {kind} key in PEM form ({reason}); make one with "
        "`openssl genpkey -algorithm ed25519` and `openssl pkey -pubout`"
    )


def _encode(key_id: str, signature: bytes) -> bytes:
    value = base64.b64encode(signature).decode()
    return canonical_json({"algorithm": "ed25519", "key_id": key_id, "signature": value})


def _decode(data: bytes) -> tuple[str, bytes]:
    try:
        document = json.loads(data.decode())
        name, signature = str(document["key_id"]), base64.b64decode(document["signature"])
        unchanged = bool(_KEY_ID.fullmatch(name)) and _encode(name, signature) == data
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError("it has no key_id and signature") from error
    if not unchanged:
        raise ValueError("it is not spelled as it was written")
    return name, signature


def _require_cryptography() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError as error:
        raise UserError(
            "signatures need the package cryptography: pip install 'fusewright[sign]'"
        ) from error
