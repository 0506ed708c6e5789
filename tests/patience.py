"""The time limit of tests that wait for an event."""

#: Seconds. It only ends what hangs: far longer than any event takes on the busiest machine, and shorter than
#: pytest's limit of a test (`timeout` in pyproject.toml), so that the test itself says what did not happen.
#: Benchmarks measure what must be quick.
HANG = 180.0
