"""Slurm's terms, as the portal explains them wherever they stand."""

from django.utils.functional import Promise
from django.utils.translation import gettext_lazy as _

__all__ = ["TERMS"]

#: Each term with its title and what it means, by the name that fields of forms have.
TERMS: dict[str, tuple[Promise, Promise]] = {
    "partition": (_("Partition"), _("A group of nodes with common limits.")),
    "account": (_("Account"), _("What a job is charged to: the site's, or a project's.")),
    "qos": (_("QOS"), _("Quality of service: limits and priority of a job.")),
    "reservation": (_("Reservation"), _("Nodes that Slurm keeps free for somebody; a booking is one.")),
}
