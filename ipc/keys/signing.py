"""Ed25519 keys (RFC 8032) with which receipts are signed: PEM files, as openssl makes and reads them.

They need the package `cryptography`, the extra `receipts`.
"""

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from ipc.errors import ConfigError, ReceiptError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

#: What the name of the file with the public key has behind that of the private one.
PUBLIC_SUFFIX = ".pub"
_MAX_BYTES = 4096  # of a key's file
_NEEDED = (
    "receipts are signed with cryptography, which is not installed: pip install cryptography, or engine-core with its "
    "extra [receipts]"
)


class SigningKey:
    """A private key. path: of a file of make_signing_key(). Errors: ConfigError."""

    def __init__(self, path: str) -> None:
        self._key = _read_private(path)
        self.public = self._key.public_key().public_bytes_raw().hex()

    def sign(self, message: bytes) -> str:
        """Return the signature of a message, 128 hexadecimal digits."""
        return self._key.sign(message).hex()


def make_signing_key(path: str) -> str:
    """Write a new private key to a new file, and its public key to another one next to it; return the public key.

    Errors: ConfigError.
    """
    _check_installed()
    from cryptography.hazmat.primitives import serialization as forms
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, forms.NoEncryption())
    public = key.public_key().public_bytes(forms.Encoding.PEM, forms.PublicFormat.SubjectPublicKeyInfo)
    for name, data, mode in ((path, private, 0o600), (path + PUBLIC_SUFFIX, public, 0o644)):
        try:
            fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
            with open(fd, "wb") as file:
                file.write(data)
        except OSError as error:
            raise ConfigError(f"the key cannot be written to {name}: {error.strerror}") from None
    return key.public_key().public_bytes_raw().hex()


def read_public_key(path: str) -> str:
    """Return the public key in a file of make_signing_key(), 64 hexadecimal digits. Errors: ConfigError."""
    _check_installed()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    data = _read(path)
    try:
        key = load_pem_public_key(data)
    except ValueError:
        key = None
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigError(f"{path} has no public Ed25519 key in PEM: `engine-core keys receipts FILE` makes FILE.pub")
    return key.public_bytes_raw().hex()


def check_signature(public: str, signature: str, message: bytes) -> None:
    """Check a signature by a public key, both hexadecimal. Errors: ReceiptError; ConfigError without cryptography."""
    _check_installed()
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public)).verify(bytes.fromhex(signature), message)
    except (InvalidSignature, ValueError):
        raise ReceiptError(
            f"the signature is not that of key {public:.16} for this receipt: it was damaged or changed after it was "
            "signed"
        ) from None


def _read_private(path: str) -> "Ed25519PrivateKey":
    _check_installed()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    data = _read(path)
    if stat.S_IMODE(os.stat(path).st_mode) & 0o077:
        raise ConfigError(f"{path} may be read by other users: chmod 600 {path}")
    try:
        key = load_pem_private_key(data, None)
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"{path} has no private Ed25519 key in PEM: make one with `engine-core keys receipts FILE`")
    return key


def _read(path: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            return file.read(_MAX_BYTES)
    except OSError as error:
        raise ConfigError(f"the key {path} cannot be read: {error.strerror}") from None


def _check_installed() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise ConfigError(_NEEDED) from None
