"""A typed client of the portal: jobs, sessions and bookings from a program, on any computer.

client = carme.Client()
job = client.submit(train, 0.1, gpus=4, nodes=2, minutes=90)
for text in job.logs(follow=True):
    print(text, end="")
print(job.result())
"""

from carme.client.admin import Admin
from carme.client.bookings import Booking, Bookings
from carme.client.connection import Login, Unreachable, trusting
from carme.client.files import Files
from carme.client.images import Image, Images
from carme.client.jobs import Array, Job, JobFailed, JobOptions, Jobs
from carme.client.main import Client
from carme.client.personal import Notices, Presets
from carme.client.projects import Projects
from carme.client.sessions import Session, Sessions

__all__ = [
    "Admin",
    "Array",
    "Booking",
    "Bookings",
    "Client",
    "Files",
    "Image",
    "Images",
    "Job",
    "JobFailed",
    "JobOptions",
    "Jobs",
    "Login",
    "Notices",
    "Presets",
    "Projects",
    "Session",
    "Sessions",
    "Unreachable",
    "trusting",
]
