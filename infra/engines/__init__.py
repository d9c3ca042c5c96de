"""Inference engines behind one seam: tokens in, tokens out."""
