#!/bin/sh
# QOS and account tree, as the site's administrators entered them.
set -eu
sacctmgr -i add cluster example
sacctmgr -i add qos gpu set Priority=100
sacctmgr -i add account university Description=all Organization=example
sacctmgr -i add account research parent=university Description=research Organization=example
sacctmgr -i add account teaching parent=university Description=teaching Organization=example
for user in ada grace alan; do
    sacctmgr -i add user "$user" account=research QOS=normal,gpu DefaultQOS=normal
    sacctmgr -i add user "$user" account=teaching
    sacctmgr -i modify user "$user" set DefaultAccount=research
done
