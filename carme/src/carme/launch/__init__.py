"""What runs on a compute node when a job starts: the standard library alone, so that it is there at once."""
