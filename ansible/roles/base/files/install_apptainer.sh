#!/bin/sh
# Installs Apptainer from a suite that is no source of this host: install_apptainer.sh SUITE MIRROR.
# apt reads sources, pinning and lists from a folder of our own, so nothing of it stays, also if this fails or is killed.
set -eu
umask 022  # apt reads what follows as an account of its own
suite=$1 mirror=$2
case "$suite" in "" | *[!a-z0-9-]*) echo "'$suite' is not the name of a suite." >&2; exit 2 ;; esac
case "$mirror" in http://* | https://*) ;; *) echo "The host's package mirror ('$mirror') is not known; install Apptainer by hand." >&2; exit 2 ;; esac

place=$(mktemp -d /tmp/carme-apptainer.XXXXXX)
trap 'rm -rf "$place"' EXIT
trap 'exit 1' HUP INT TERM
chmod 0755 "$place"
mkdir -p "$place/sources" "$place/preferences" "$place/lists/partial"
etc=${CARME_APT_DIRECTORY:-/etc/apt}
cp "$etc"/sources.list.d/*.sources "$etc"/sources.list.d/*.list "$place/sources/" 2>/dev/null || true
cp "$etc"/preferences.d/* "$place/preferences/" 2>/dev/null || true

# A mirror's index of unstable may be older than it promises; its signature is checked all the same.
cat >"$place/sources/carme.sources" <<END
Types: deb
URIs: $mirror
Suites: $suite
Components: main
Check-Valid-Until: no
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
END
cat >"$place/preferences/00carme" <<END
Package: apptainer
Pin: release a=$suite
Pin-Priority: 500

Package: *
Pin: release a=$suite
Pin-Priority: 1
END

set -- -o Dir::Etc::SourceParts="$place/sources" -o Dir::Etc::PreferencesParts="$place/preferences" \
    -o Dir::State::Lists="$place/lists" -o DPkg::Lock::Timeout=300 -q
apt-get "$@" update
DEBIAN_FRONTEND=noninteractive apt-get "$@" install --yes --no-install-recommends apptainer
