"""Projects: people who share what Slurm grants them."""
