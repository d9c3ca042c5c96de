"""Who acts: learners, reloaders, and the readers they share."""
