"""The root of all errors, and what can go wrong with bytes and schemas. `infra.errors` draws the whole tree."""

from __future__ import annotations


class MillraceError(Exception):
    """Root of the tree: every error that Millrace raises on purpose."""


class SchemaError(MillraceError):
    """The codec cannot read or write a record."""


class UnknownSchema(SchemaError):
    """No schema with this fingerprint: written by a newer release, or not by Millrace at all."""


class CorruptRecord(SchemaError):
    """The bytes do not decode with their schema, or a record does not fit the schema it is encoded with."""


class UnknownKey(CorruptRecord):
    """A record that is encoded has a key, at some depth, that its schema does not have: most likely it is misspelt."""


class BeyondBounds(SchemaError):
    """A field of a record is beyond its bound (`schemas.bounds`); the message names the field and the bound."""
