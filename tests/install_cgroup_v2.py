"""Make the root folder of a virtual machine with Slurm, from Debian 12's packages.

    python tests/install_cgroup_v2.py

Needs root, mmdebstrap, pip and the Debian mirror of this host. See real_cgroup_v2.py.
"""

import json
import shutil
import subprocess
import sys

from real_cgroup_v2 import PACKAGES, SUITE, cached_root

from carme_demo import registries

#: What the exporter imports besides Carme's own parts.
LIBRARIES = ["prometheus-client", "nvidia-ml-py"]
SITE_PACKAGES = "opt/carme/venv/lib/python3.11/site-packages"
HOOKS = [
    # Few modules: all of them would take the emulated processor half a minute to unpack.
    'echo MODULES=list >"$1/etc/initramfs-tools/conf.d/carme"',
    'printf "%s\\n" virtio_pci virtio_blk virtio_console virtio_net >>"$1/etc/initramfs-tools/modules"',
    'chroot "$1" update-initramfs -u',
    'chroot "$1" useradd --system --user-group --shell /usr/sbin/nologin carme-exporter',
    'chroot "$1" useradd --uid 2001 --create-home --shell /bin/bash alice',
    'chroot "$1" useradd --uid 2002 --create-home --shell /bin/bash bob',
    'chroot "$1" python3 -m venv --without-pip /opt/carme/venv',
    # No user signs in, and no package is updated.
    'chroot "$1" systemctl mask getty@tty1 serial-getty@ttyS0 apt-daily.timer apt-daily-upgrade.timer '
    "dpkg-db-backup.timer e2scrub_all.timer e2scrub_reap systemd-timesyncd systemd-logind",
    'chroot "$1" systemctl enable systemd-networkd munge slurmctld slurmd',
]


def main() -> int:
    """Make the folder; return the exit code."""
    root = cached_root()
    if root.is_dir():
        return 0
    host = registries.of_host()
    draft = root.with_name(f"{root.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    root.parent.mkdir(parents=True, exist_ok=True)
    options = [f"--aptopt={name} {json.dumps(value)}" for name, value in host.apt_options]
    options += [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "man", "locale")]
    options += [f"--customize-hook={hook}" for hook in HOOKS]
    include = f"--include={','.join(PACKAGES)}"
    command = ["mmdebstrap", "--variant=minbase", "--format=directory", include, *options, SUITE, draft]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", draft / SITE_PACKAGES]
    pip += ["--python-version=3.11", "--only-binary=:all:", *LIBRARIES]
    for step in ([*command, *host.debian_sources(SUITE)], pip):
        if code := subprocess.run(step).returncode:
            return code
    draft.rename(root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
