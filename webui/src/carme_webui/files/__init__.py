"""My files in the browser: looking, fetching, sending, tidying up; all of it is done as the user."""
