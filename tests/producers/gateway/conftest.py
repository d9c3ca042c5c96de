"""The renderer that these tests share."""

from tests.support.renderer import renderer

__all__ = ["renderer"]
