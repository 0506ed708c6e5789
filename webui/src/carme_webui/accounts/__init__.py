"""Who may sign in: user names are the site's Unix accounts."""
