"""What all unit tests share."""

import hypothesis

# The same examples in each run, so that none fails by luck, and no limit of time: a busy machine exceeds any.
# For new examples: --hypothesis-profile default
hypothesis.settings.register_profile(
    "same everywhere",
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("same everywhere")
