"""What administrators see and do: users, jobs, nodes, and the audit log."""
