"""A user's files from afar: what the portal asks (`client`), and the program that does it as the user."""
