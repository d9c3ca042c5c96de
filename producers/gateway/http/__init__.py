"""What enters over HTTP: whose request it is, where it goes, how much of it at once, and streams back."""
