"""Training with differential privacy: per-record gradients, the probe of losses, the step itself."""
