"""How long tests wait for what must come."""

#: Seconds. It only ends what hangs: far longer than anything takes on the busiest machine, and shorter than
#: what pytest gives a test (`timeout` in pyproject.toml), so that the test itself says what did not come.
#: What must be quick is measured by a benchmark.
HANG = 180.0
