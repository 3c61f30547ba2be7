"""Model: loading, packing, shared-prompt attention and the log-probabilities of policy, old policy and reference."""
