# Sourced by scripts that compile a wheel while an image is built: it is compiled once, and the compiler leaves the image again.
#
# Wheels stay in the cache that all builds share (/mnt/pip-cache), under a hash of what went into them.
set -e
python=/opt/carme/env/bin/python
pip=/opt/carme/env/bin/pip

# add_packages PACKAGE ...: Debian packages that stay.
add_packages() {
    apt-get -qq update
    apt-get -qq install --no-install-recommends "$@" >/dev/null
    apt-get clean
    rm -rf /var/lib/apt/lists/*
}

# remove_since FILE: the packages that were not wanted when `apt-mark showmanual | sort` wrote FILE, and what only they need.
remove_since() {
    apt-mark showmanual | sort | comm -13 "$1" - | xargs -r apt-mark auto >/dev/null
    # It would keep what another package merely suggests.
    apt-get -qq -o APT::AutoRemove::SuggestsImportant=false autoremove --purge >/dev/null
    rm -f "$1"
}

# build_once NAME KEY PACKAGES COMMAND ARGUMENT ...: sets `wheels` to a folder that COMMAND ARGUMENT ... FOLDER has filled,
# now or in an earlier build. PACKAGES, in one word, are Debian's; they are there while COMMAND runs, whatever becomes of it.
build_once() {
    wheels=/mnt/pip-cache/$1-$2
    if [ -e "$wheels/complete" ]; then
        return
    fi
    rm -rf "/mnt/pip-cache/$1"-*
    wanted=$(mktemp)
    apt-mark showmanual | sort >"$wanted"
    trap 'remove_since "$wanted"' EXIT
    # shellcheck disable=SC2086  # several words
    add_packages $3
    shift 3
    "$@" "$wheels"
    trap - EXIT
    remove_since "$wanted"
    touch "$wheels/complete"
}
