#!/bin/sh
# Stands in for BeeGFS's `beeond` in tests, as no BeeGFS can be here: the same words, a memory file system in the place of
# BeeGFS, a process that sleeps in the place of its servers, and only on the host where it is called. What it notes in its
# status file, and what it does with that, is like the original: lines HOST,SERVICE,PATH,LOG,PIDFILE.
set -eu
action=$1
shift
nodes='' data='' mount='' status=/tmp/beeond.tmp delete='' fresh='' log=''
while getopts n:d:c:i:L:f:FPq option 2>/dev/null; do
    [ "$action" = start ] || break
    case $option in
        n) nodes=$OPTARG ;; d) data=$OPTARG ;; c) mount=$OPTARG ;; i) status=$OPTARG ;; L) log=$OPTARG ;; F) fresh=1 ;;
    esac
done
case $action in
    start)
        if [ -e "$status" ]; then
            echo "ERROR: Statusfile $status on one ore more hosts already exists." >&2
            exit 1
        fi
        if [ -n "${BEEOND_FAILS:-}" ] || [ -e /run/beeond-fails ]; then
            touch "$status"
            echo "ERROR: Host is unreachable via ssh: $(tail -n 1 "$nodes")" >&2
            exit 1
        fi
        [ -z "$fresh" ] || rm -rf "$data"
        mkdir -p "$data" "$mount" "$log"
        mount -t tmpfs -o size=64m,mode=0777 tmpfs "$mount"
        setsid sleep 100000 </dev/null >/dev/null 2>&1 &
        echo $! >"$data/storage.pid"
        printf 'local,beegfs-storage,%s,%s/storage.log,%s\nlocal,beegfs-client,%s,-,-\n' "$data" "$log" "$data/storage.pid" "$mount" >"$status"
        ;;
    stoplocal)
        OPTIND=1
        while getopts i:qcdLus option; do
            case $option in i) status=$OPTARG ;; d) delete=1 ;; esac
        done
        [ -f "$status" ] || exit 0
        while IFS=, read -r _ service path _ pidfile; do
            case $service in
                beegfs-client) umount -l "$path" ;;
                *)
                    [ ! -e "$pidfile" ] || kill "$(cat "$pidfile")"
                    [ -z "$delete" ] || rm -rf "$path"
                    ;;
            esac
        done <"$status"
        rm -f "$status"
        ;;
    *)
        echo "ERROR: no such action: $action" >&2
        exit 1
        ;;
esac
