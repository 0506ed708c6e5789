"""Images that users build for themselves and their projects."""
