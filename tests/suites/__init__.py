"""What `./test` does: prepare what the suites need, run them, some beside each other, and report once.

`arguments` reads the command line, `plan` says what each suite runs, `benchmarks` what each benchmark does.
`debian`, `environments` and `core` prepare programs, Python environments and the native core; `demo_hosts`
and `beside` run what goes on meanwhile; `running` runs commands and notes how they ended. The package uses
Python's own library alone, as it runs before anything is installed.
"""
