"""Carme's portal: accounts, sessions and jobs in the browser, and the site's identity provider."""
