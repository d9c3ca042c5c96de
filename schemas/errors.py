"""What can go wrong with bytes and schemas.

SchemaError
├── UnknownSchema     the fingerprint belongs to no schema of this release or its history
└── CorruptRecord     the bytes do not decode, or the record does not fit its schema
"""

from __future__ import annotations


class SchemaError(Exception):
    """Root of everything the codec raises."""


class UnknownSchema(SchemaError):
    """No schema with this fingerprint: written by a newer release, or not by Millrace at all."""


class CorruptRecord(SchemaError):
    """The bytes do not decode with their schema, or a record does not fit the schema it is encoded with."""
