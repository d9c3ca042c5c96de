"""What is learned: pure functions beside their equations, composed into algorithms that are chosen by name."""
