"""The site existing-26.05: Debian 13 with the Slurm 26.05 of Debian testing, and without Apptainer."""

from carme_demo import image

from .existing_slurm import HOSTS, SHARED, ExistingSlurm
from .site_hosts import SiteDescription

#: Slurm and what it needs come from testing, all else from Debian 13: hosts whose control groups are those of
#: version 1 cannot boot the systemd of testing.
TESTING = r"""
mirror=$(sed -n 's/^deb \(\[[^]]*\] \)\{0,1\}\([^ ]*\) .*/\2/p' /etc/apt/sources.list | head -n 1)
echo "deb $mirror testing main" >/etc/apt/sources.list.d/testing.list
printf 'Package: *\nPin: release a=testing\nPin-Priority: 100\n' >/etc/apt/preferences.d/testing
apt-get -q update
apt-get -q install --yes --no-install-recommends --target-release testing munge slurm-client
"""
SITE = ExistingSlurm(
    name="existing-26.05",
    slurm="26.05",
    description=SiteDescription(
        name="site2605",
        domain="example.org",
        subnet="10.81.0.0/24",
        system=image.System("trixie", (*image.PACKAGES, "sudo", "nano", "man-db")),
        hosts=HOSTS,
        shared=SHARED,
    ),
    packages={
        "portal": ("nginx-light",),
        "ctl": ("mariadb-server", "--target-release testing slurmctld slurmdbd"),
        "gpu-01": ("--target-release testing slurmd",),
        "gpu-02": ("--target-release testing slurmd",),
    },
    before=TESTING,
    own_apptainer=False,
    variables={"base_apptainer_suite": "unstable"},
    renamed={"JobContainerType=job_container/tmpfs": "NamespaceType=namespace/tmpfs"},
    slurmd="--systemd",
)
