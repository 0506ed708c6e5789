"""Interactive sessions: from the start form to the end of the Slurm job."""
