"""What the cluster as a whole does, from the broker's snapshot of it."""
