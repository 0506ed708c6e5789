"""The REST API, `/api/v1/`: what the pages do, for programs."""
