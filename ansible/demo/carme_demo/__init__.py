"""The demo cluster: real hosts on one machine, set up by the playbook that a site uses."""
