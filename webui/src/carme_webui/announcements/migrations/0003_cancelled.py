from typing import ClassVar

from django.db import migrations


class Migration(migrations.Migration):
    dependencies: ClassVar = [("announcements", "0002_reserved")]

    operations: ClassVar = [
        migrations.RenameField("Maintenance", "called_off", "cancelled"),
    ]
