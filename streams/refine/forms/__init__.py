"""Encoded text, decoded before detectors read it, with every byte traced back to where it came from."""
