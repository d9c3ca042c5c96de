"""What a value must look like to be a secret: checksums, encodings, and how drawn it looks."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from itertools import pairwise
from string import ascii_lowercase, ascii_uppercase, digits
from urllib.parse import unquote_to_bytes

from mnemonic import Mnemonic

_BASE58 = b"123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_WORDS = re.compile(
    rb"sha-?\d|md5|pbkdf|hmac|oauth|base64|aes-?\d|argon|utf-?\d|://|^/|^\.\.?/|^[vV]?\d+(?:\.\d+)+$|^\$|\.\.\.", re.I
)
"""what stands beside the name of a secret and is none: algorithms, addresses, paths, versions, placeholders"""
_KEY_CHARS = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=\r\n\\\"' >|,*#\t")
_CLASSES = bytes(
    97 if chr(n) in ascii_lowercase else 65 if chr(n) in ascii_uppercase else 48 if chr(n) in digits else n
    for n in range(256)
)
_LINE_END = re.compile(rb"[A-Za-z0-9+/]{40}[\s\"'\\n+]*\Z")
_LINE_BEGIN = re.compile(rb"[\s\"'\\n+]+[A-Za-z0-9+/]{40}")
_BIP39 = Mnemonic("english")
BIP39_WORDS = "|".join(_BIP39.wordlist)
TAIL = 16_384
"""bytes before the end line of a key in which its lines are looked for"""


def is_card_number(digits: bytes) -> bool:
    """Whether a brand of payment cards issues numbers of this beginning and length."""
    size, two, three, four, six = len(digits), int(digits[:2]), int(digits[:3]), int(digits[:4]), int(digits[:6])
    match digits[:1]:
        case b"2":
            return size == 16 and 222100 <= six <= 272099
        case b"3":
            if two in (34, 37):
                return size == 15
            if 3528 <= four <= 3589:
                return 16 <= size <= 19
            return (300 <= three <= 305 or three == 309 or two in (36, 38, 39)) and 14 <= size <= 19
        case b"4":
            return size in (13, 16, 19)
        case b"5":
            return (51 <= two <= 55 and size == 16) or (four in (5018, 5020, 5038, 5893) and size <= 19)
        case b"6":
            if four in (6304, 6759, 6761, 6762, 6763):
                return size <= 19
            return (four == 6011 or 644 <= three <= 649 or two in (62, 65)) and 16 <= size <= 19
        case _:
            return False


def is_drawn(value: bytes) -> bool:
    """Whether a value looks like a password or key, not like a word, a variable, a path or a version: letters and
    digits, and either three kinds of characters or a long run of lower case."""
    value = value.rstrip(b".,;:!?")
    if len(value) < 8 or len(set(value)) < 6 or _WORDS.search(value):
        return False
    lower, upper, digit = (re.search(kind, value) is not None for kind in (rb"[a-z]", rb"[A-Z]", rb"[0-9]"))
    symbol = re.search(rb"[^A-Za-z0-9_.]", value) is not None
    if not digit or not (lower or upper):
        return False
    return lower + upper + digit + symbol >= 3 or re.fullmatch(rb"[0-9a-f]{16,}|[a-z0-9]{20,}", value) is not None


def is_random(value: bytes) -> bool:
    """Whether a run of 20 and more looks drawn letter by letter: capitals, small letters and digits change places at
    two of five steps (by chance it is three of five, in names and paths one of ten). Addresses of Solana and public
    keys of SSH look so too, and are none."""
    value = value.rstrip(b"=")
    if len(value) < 20 or value.startswith(b"AAAA") or (len(value) in (43, 44) and not value.translate(None, _BASE58)):
        return False
    shape = value.translate(_CLASSES)
    return all(kind in shape for kind in b"aA0") and _changes(value) >= 0.42 * len(value) and b"a" * 10 not in shape


def is_random_or_hex(value: bytes) -> bool:
    """The same, or 32 and more digits of hexadecimal."""
    return is_random(value) or (re.fullmatch(rb"[0-9a-f]{32,128}", value) is not None and len(set(value)) > 7)


def is_made_up(value: bytes) -> bool:
    """Whether a word of a sentence is a password: with a sign in it and a part that looks drawn, and no name of a
    model, a version or an id."""
    parts = re.split(rb"[^A-Za-z0-9]+", value.rstrip(b".,;:"))
    if len(parts) < 2 or re.match(rb"[a-z]{2,12}[_-][A-Za-z0-9_-]+\Z", value):
        return False
    return any(len(part) >= 8 and _changes(part) >= 4 and is_drawn(part) for part in parts)


def _changes(value: bytes) -> int:
    return sum(a != b for a, b in pairwise(value.translate(_CLASSES)))


def of_no_block(text: bytes, start: int) -> int | None:
    """`start`, unless 40 letters of base64 there are a line of several."""
    before, after = text[max(0, start - 80) : start], text[start + 40 : start + 100]
    is_line = _LINE_END.search(before) or _LINE_BEGIN.match(after)
    return None if is_line else start


def is_seed(words: bytes) -> bool:
    """Whether 12 to 24 words of BIP 39 are a phrase: with its checksum, or in no order of the alphabet."""
    phrase = words.decode().split()
    if len(phrase) not in (12, 15, 18, 21, 24):
        return False
    return _BIP39.check(" ".join(phrase)) or phrase != sorted(phrase)


def has_drawn_value(pairs: bytes) -> bool:
    """Whether one of the values of a cookie header is drawn and long."""
    values = (pair.partition(b"=")[2].strip() for pair in pairs.split(b";"))
    return any(len(value) >= 16 and is_drawn(unquote_to_bytes(value)) for value in values)


def is_user_pass(value: bytes) -> bool:
    """Whether base64 holds user:password."""
    data = _base64(value)
    return data is not None and re.fullmatch(rb"[\x21-\x7e]{0,128}:[\x20-\x7e]{1,256}", data) is not None


def is_digest_32(value: bytes) -> bool:
    """Whether a part of a URL is 32 bytes in base64."""
    data = _base64(unquote_to_bytes(value))
    return data is not None and len(data) == 32


def begins_with_digits(value: bytes) -> bool:
    """Whether the part before the first dot is a number in base64, as in a token of Discord."""
    data = _base64(value.partition(b".")[0])
    return data is not None and re.fullmatch(rb"[0-9]{15,20}", data) is not None


def is_base58check(value: bytes) -> bool:
    """Whether base58 ends with the checksum of what it holds."""
    number = 0
    for char in value:
        number = number * 58 + _BASE58.index(char)
    data = number.to_bytes((number.bit_length() + 7) // 8, "big")
    return hashlib.sha256(hashlib.sha256(data[:-4]).digest()).digest()[:4] == data[-4:]


def is_seed_length(words: bytes) -> bool:
    """Whether it has as many words as a seed phrase."""
    return len(re.findall(rb"[a-zA-Z]+", words)) in (12, 15, 18, 21, 24)


def key_tail(text: bytes, end: int) -> int | None:
    """Where the lines of a key begin whose end line begins at `end`; None when its first line is there too, or when
    nothing before it looks like a key."""
    first = max(0, end - TAIL)
    before = text[first:end]
    at = len(before)
    while at and before[at - 1] in _KEY_CHARS:
        at -= 1
    if before[:at].endswith(b"-----") or not re.search(rb"[A-Za-z0-9+/=]{16}", before[at:]):
        return None
    return first + at


def _base64(value: bytes) -> bytes | None:
    url_safe = b"-_" if re.search(rb"[-_]", value) else None
    try:
        return base64.b64decode(value + b"=" * (-len(value) % 4), altchars=url_safe, validate=True)
    except (binascii.Error, ValueError):
        return None
