"""What can go wrong with bytes and schemas.

SchemaError
├── UnknownSchema     the fingerprint belongs to no schema of this release or its history
├── CorruptRecord     the bytes do not decode, or the record does not fit its schema
│   └── UnknownKey    a record that is encoded has a key that its schema does not have
└── BeyondBounds      a field of the record is beyond its bound
"""

from __future__ import annotations


class SchemaError(Exception):
    """Root of everything the codec raises."""


class UnknownSchema(SchemaError):
    """No schema with this fingerprint: written by a newer release, or not by Millrace at all."""


class CorruptRecord(SchemaError):
    """The bytes do not decode with their schema, or a record does not fit the schema it is encoded with."""


class UnknownKey(CorruptRecord):
    """A record that is encoded has a key, at some depth, that its schema does not have: most likely it is misspelt."""


class BeyondBounds(SchemaError):
    """A field of a record is beyond its bound (`schemas.limits`); the message names the field and the bound."""
