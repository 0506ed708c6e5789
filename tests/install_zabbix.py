"""Install Zabbix with PostgreSQL and its web pages into a root folder of its own, from Debian's packages.

    python tests/install_zabbix.py

Needs root, mmdebstrap and the Debian mirror of this host. See real_zabbix.py.
"""

import json
import shutil
import subprocess
import sys

from real_zabbix import ROOT

from carme_demo import registries

SUITE = "trixie"  # has Zabbix 7.0
PACKAGES = ["postgresql", "zabbix-server-pgsql", "zabbix-frontend-php", "php-cli", "php-pgsql"]
PACKAGES += ["php-mbstring", "php-gd", "php-bcmath", "php-xml", "locales"]
LOCALE = 'chroot "$1" localedef -i en_US -f UTF-8 en_US.UTF-8'  # the pages' only language

if __name__ == "__main__":
    host = registries.of_host()
    draft = ROOT.with_name("zabbix.draft")
    shutil.rmtree(draft, ignore_errors=True)
    ROOT.parent.mkdir(parents=True, exist_ok=True)
    options = [f"--aptopt={name} {json.dumps(value)}" for name, value in host.apt_options]
    include = f"--include={','.join(PACKAGES)}"
    command = ["mmdebstrap", "--variant=minbase", "--format=directory", include, *options]
    command.append(f"--customize-hook={LOCALE}")
    done = subprocess.run([*command, SUITE, draft, *host.debian_sources(SUITE)])
    if done.returncode == 0:
        shutil.rmtree(ROOT, ignore_errors=True)
        draft.rename(ROOT)
    sys.exit(done.returncode)
