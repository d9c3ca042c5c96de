"""What readers of the warehouse are given: documented views, and questions that are asked by name."""
