"""The site existing-22.05: Debian 12 with its Slurm 22.05, and users of a directory (LDAP)."""

from carme_demo import image

from .existing_slurm import HOSTS, NETWORK, SHARED, ExistingSlurm
from .site_hosts import SiteDescription

SYSTEM = image.System(
    "bookworm",
    (*image.PACKAGES, "sudo", "munge", "slurm-client", "libpmix2", "nano", "man-db"),
)
SSSD = "sssd-ldap libnss-sss"
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
        "portal": (f"nginx-light {SSSD}",),
        "ctl": (f"slurmctld slurmdbd mariadb-server slapd {SSSD}",),
        "gpu-01": (f"slurmd {SSSD}",),
        "gpu-02": (f"slurmd {SSSD}",),
    },
    directory="ctl",
)
