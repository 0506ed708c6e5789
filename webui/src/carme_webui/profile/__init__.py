"""What a user sees and sets of their own account."""
