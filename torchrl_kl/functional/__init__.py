"""Log-probabilities and distributions in, KL numbers out; sums over masks and trajectories."""
