from typing import ClassVar

from django.db import migrations


class Migration(migrations.Migration):
    dependencies: ClassVar = [("bookings", "0005_longer_images")]

    operations: ClassVar = [
        migrations.RenameField("Booking", "kept", "reserved"),
        migrations.RenameField("Booking", "stage_asked", "stage_requested"),
    ]
