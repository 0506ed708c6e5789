"""Bookings: nodes with GPUs that users keep for a time, shown in a calendar."""
