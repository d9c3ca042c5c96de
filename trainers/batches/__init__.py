"""From trajectories to tensors: samples, minibatches, allocation over ranks, packing."""
