"""What clients speak: one dialect a file, and one conversation behind all of them."""
