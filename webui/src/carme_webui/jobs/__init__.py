"""The jobs of the cluster, mirrored from Slurm and kept when Slurm forgets them."""
