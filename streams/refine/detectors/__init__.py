"""What finds secrets and personal data in text. One abstract base, its siblings, and a guard around native code."""
