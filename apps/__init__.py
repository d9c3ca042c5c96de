"""The programs: the only room that may import all others."""
