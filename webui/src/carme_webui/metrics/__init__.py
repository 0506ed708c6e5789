"""The site's metrics for its users: everybody sees the series of their own jobs, and no others."""
