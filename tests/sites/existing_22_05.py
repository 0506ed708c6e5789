"""The site existing-22.05: Debian 12 with its Slurm 22.05."""

from carme_demo import image

from .existing_slurm import HOSTS, NETWORK, SHARED, ExistingSlurm
from .site_hosts import SiteDescription

SYSTEM = image.System(
    "bookworm",
    (*image.PACKAGES, "sudo", "munge", "slurm-client", "libpmix2", "nano", "man-db"),
)
SITE = ExistingSlurm(
    name="existing-22.05",
    slurm="22.05",
    description=SiteDescription(
        name="site2205",
        domain="example.org",
        subnet=f"{NETWORK}0/24",
        system=SYSTEM,
        hosts=HOSTS,
        shared=SHARED,
    ),
    packages={
        "portal": ("nginx-light",),
        "ctl": ("slurmctld slurmdbd mariadb-server",),
        "gpu-01": ("slurmd",),
        "gpu-02": ("slurmd",),
    },
)
