#!/usr/bin/python3
"""Renew the site's certificate by ACME (RFC 8555) if it is time, and let nginx serve what lies in its files.

carme-certificate.timer runs it on each head. Without an ACME server's address it only looks whether the site
has put another certificate into the files. nginx reloads, so open connections stay. It prints a line for each
change. What fails stands on standard error, and the certificate of before stays in use.
"""

import argparse
import hashlib
import os
import re
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path

#: The name that certbot knows the certificate by.
NAME = "carme"
#: Beside the certificate: programs of the site for those who serve it too.
HOOKS = "deploy.d"
#: For which certificate they last ran here: each head has its own, so it does not lie beside what heads copy.
HANDED_ON = "handed-on"
#: One that nobody renews is to be replaced when it has so many days left.
DAYS_LEFT = 14
PROGRAM_SECONDS = 600
#: How long nginx may take until it serves what it has read.
RELOAD_SECONDS = 20


class Failed(Exception):
    """What did not work, and what to do."""


def run(command, **environment):
    """Run a program to its end, with these variables besides; raises Failed where it cannot."""
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=PROGRAM_SECONDS,
            env=dict(os.environ, **environment),
            check=False,
        )
    except FileNotFoundError:
        text = f"{command[0]} is not installed. Install it, and start carme-certificate again."
        raise Failed(text) from None
    except subprocess.TimeoutExpired:
        raise Failed(f"{command[0]} did not end within {PROGRAM_SECONDS} seconds.") from None


def renew(options):
    """Have certbot request a certificate, if there is none or it ends within a month; put it in place."""
    if options.only_while and run(["systemctl", "is-active", "--quiet", options.only_while]).returncode:
        return
    state = Path(options.state)
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    webroot = Path(options.webroot)
    webroot.mkdir(parents=True, exist_ok=True)
    webroot.chmod(0o755)  # also where somebody had made it closed to nginx
    mail = ["--email", options.email] if options.email else ["--register-unsafely-without-email"]
    done = run(
        [
            *[options.certbot, "certonly", "--non-interactive", "--agree-tos", *of_last(options)],
            *["--server", options.directory, *mail, "--cert-name", NAME, "--renew-with-new-domains"],
            *["--webroot", "--webroot-path", options.webroot],
            *["--config-dir", str(state), "--work-dir", str(state / "work"), "--logs-dir", options.logs],
            *(word for name in options.names for word in ("--domain", name)),
        ]
    )
    if done.returncode:
        lines = " ".join(done.stdout.split())[-1000:]
        raise Failed(
            f"{options.directory} gave no certificate for {', '.join(options.names)}: {lines} "
            f"The server must reach port 80 of {options.names[0]}. certbot's log is in {options.logs}."
        )
    live = state / "live" / NAME
    # nginx reads neither of them until it reloads.
    replace(Path(options.key), (live / "privkey.pem").read_bytes(), 0o600)
    if replace(Path(options.certificate), (live / "fullchain.pem").read_bytes(), 0o644):
        print(f"New certificate from {options.directory}")


def of_last(options):
    """certbot's words for when it requests one, and for which account, by what it noted of the last one.

    At once where that came from another server; else when it ends, and for the same account: where there are
    several, as with what was restored beside a new one, certbot asks which.
    """
    state = Path(options.state)
    renewal = state / "renewal" / f"{NAME}.conf"
    text = renewal.read_text() if renewal.exists() else ""
    noted = dict(re.findall(r"^(server|account)\s*=\s*(\S+)", text, re.MULTILINE))
    if noted.get("server", options.directory) != options.directory:
        return ["--force-renewal"]
    account = noted.get("account")
    is_there = account and any(path.name == account for path in state.glob("accounts/**/*"))
    return ["--keep-until-expiring", *(["--account", account] if is_there else [])]


def replace(path, text, mode):
    """Give a file another content, if it has not got that already; whether it had not."""
    if path.exists() and path.read_bytes() == text:
        return False
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(text)
        os.fsync(file.fileno())
    new.replace(path)
    return True


def served(options):
    """The certificate that nginx gives to a client now; None where it does not answer."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # it is compared with the file
    try:
        plain = socket.create_connection(("127.0.0.1", options.port), timeout=10)
        with plain, context.wrap_socket(plain, server_hostname=options.names[0]) as stream:
            return stream.getpeercert(binary_form=True)
    except OSError:
        return None


def in_file(path):
    """The first certificate of a chain."""
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    text = path.read_text(errors="replace")
    try:
        return ssl.PEM_cert_to_DER_cert(text[text.index(begin) : text.index(end) + len(end)])
    except ValueError:
        raise Failed(f"{path} holds no certificate. Put it there in PEM, followed by its chain.") from None


def serve(options):
    """Let nginx serve the certificate in the file.

    Raises:
        Failed: It does not take it, and goes on with the one that it has.
    """
    wanted, now = in_file(Path(options.certificate)), served(options)
    if now in (None, wanted):  # where nginx does not run, it reads the file when it starts
        return
    checked = run([*options.nginx.split(), "-t", "-q"])
    if checked.returncode:
        raise Failed(
            "nginx keeps the previous certificate, as it does not accept the new one: "
            f"{checked.stdout.strip()} "
            f"Put a certificate and its own key into {options.certificate} and {options.key}."
        )
    reloaded = run(options.reload.split())
    if reloaded.returncode:
        raise Failed(f"nginx could not be reloaded: {reloaded.stdout.strip()}")
    until = time.monotonic() + RELOAD_SECONDS
    while served(options) != wanted:
        if time.monotonic() > until:
            raise Failed(f"nginx serves another certificate than {options.certificate}. See its error log.")
        time.sleep(0.1)
    print(f"nginx serves the new certificate in {options.certificate}")


def distribute(options):
    """Run the site's programs that let the other services take the certificate, until each has taken it."""
    certificate = Path(options.certificate)
    folder, stamp = Path(options.hooks) / HOOKS, Path(options.own) / HANDED_ON
    programs = sorted(folder.iterdir()) if folder.is_dir() else []
    programs = [path for path in programs if path.is_file() and os.access(path, os.X_OK)]
    digest = hashlib.sha256(certificate.read_bytes()).hexdigest()
    if not programs or (stamp.exists() and stamp.read_text() == digest):
        return
    failed = []
    for program in programs:
        done = run([str(program)], CARME_CERTIFICATE=options.certificate, CARME_KEY=options.key)
        if done.returncode:
            failed.append(f"{program} ended with {done.returncode}: {done.stdout.strip()[-500:]}")
    if failed:
        raise Failed(" ".join(failed))
    stamp.parent.mkdir(parents=True, exist_ok=True)
    stamp.write_text(digest)
    print(f"Handed the certificate on to {len(programs)} programs of {folder}")


def check_expiry(options):
    """Say when a certificate that nobody renews is to be replaced, as the last one that came by ACME."""
    seconds = str(DAYS_LEFT * 86400)
    done = run(["openssl", "x509", "-noout", "-checkend", seconds, "-in", options.certificate])
    if "will expire" in done.stdout:
        raise Failed(
            f"The certificate in {options.certificate} ends within {DAYS_LEFT} days, or has ended. Put a new "
            f"one and its key into {options.certificate} and {options.key}; where they are not yours, delete "
            "both and run site.yml again."
        )


def options_of(arguments):
    """The command line."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("names", nargs="+", metavar="NAME", help="what the certificate is for, the site's name first")
    add("--certificate", required=True, help="the file that nginx reads: the certificate and its chain")
    add("--key", required=True, help="the file that nginx reads: its key")
    add("--port", type=int, default=443, help="where nginx listens (443)")
    add("--hooks", default="/etc/carme/tls", help=f"the folder of {HOOKS} (/etc/carme/tls)")
    add(
        "--own",
        default="/var/lib/carme-certificate",
        help="a folder of this head (/var/lib/carme-certificate)",
    )
    add("--directory", help="the address of the ACME server's directory; without it nothing is renewed")
    add("--email", help="where the ACME server writes to")
    add("--state", default="/etc/carme/tls/acme", help="folder of the ACME client's accounts and keys")
    add("--logs", default="/var/log/carme/acme", help="folder of the ACME client's logs")
    add("--webroot", default="/run/carme-acme", help="folder in which nginx finds answers to challenges")
    add("--only-while", metavar="UNIT", help="renew only while this unit runs")
    add("--certbot", default="certbot", help=argparse.SUPPRESS)
    add("--nginx", default="nginx", help=argparse.SUPPRESS)
    add("--reload", default="systemctl reload nginx", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments=None):
    """All steps, each although another has failed; 1 where one has."""
    options = options_of(arguments)
    os.umask(0o022)  # who starts it by hand may have another: nginx must read what it writes
    failures = []
    for step in (renew if options.directory else check_expiry, serve, distribute):
        try:
            step(options)
        except Failed as failure:
            failures.append(str(failure))
        except OSError as error:
            failures.append(f"{error.filename}: {error.strerror}.")
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
