#!/bin/sh
# Makes a package of Apptainer for Debian 12: apptainer-deb.sh MIRROR FILE. Without a MIRROR (an empty word) it takes this host's.
# It stands in for upstream's .deb, which an administrator of Debian 12 installs: the programs are those of Debian's unstable, which
# need a newer C library than Debian 12 has; they get that library in a folder of their own. No role of Carme does this.
set -eu
mirror=${1:-$(sed -n 's/^deb \(\[[^]]*\] \)\{0,1\}\([^ ]*\) .*/\2/p' /etc/apt/sources.list | head -n 1)} file=$2
[ ! -s "$file" ] || exit 0
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"
mkdir -p sources lists/partial
: >status
cat >sources/unstable.sources <<END
Types: deb
URIs: $mirror
Suites: unstable
Components: main
Check-Valid-Until: no
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
END
unstable() {
    apt-get -q -o Dir::Etc::SourceList=/dev/null -o Dir::Etc::SourceParts="$place/sources" -o Dir::State::Lists="$place/lists" -o Dir::State::Status="$place/status" "$@"
}
chmod 0755 .
unstable update
unstable download apptainer libc6
apt-get -q update
apt-get -q download patchelf
dpkg-deb -R apptainer_*.deb package
dpkg-deb -x libc6_*.deb libc
dpkg-deb -x patchelf_*.deb patchelf
library=/opt/apptainer-libc
mkdir -p "package$library"
find libc -type f -path '*/x86_64-linux-gnu/*.so*' -exec cp -t "package$library" {} +
loader=$(cd "package$library" && ls ld-linux-*.so.*)
for program in package/usr/bin/apptainer $(find package/usr/lib* -name 'starter*' -type f); do
    patchelf/usr/bin/patchelf --set-interpreter "$library/$loader" --set-rpath "$library" "$program"
done
sed -i -E '/^Depends:/s/libc6 \([^)]*\), *//; /^Version:/s/$/+site/' package/DEBIAN/control
(cd package && find . -type f ! -path './DEBIAN/*' -printf '%P\0' | xargs -0 md5sum >DEBIAN/md5sums)
dpkg-deb --root-owner-group -Zgzip -b package "$file.draft"
mv "$file.draft" "$file"
