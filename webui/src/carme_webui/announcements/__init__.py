"""What administrators announce: news, and times of maintenance."""
